// The page: keys and suggestions as buttons, one question to the server at a time, and the latest answer on the screen. With an
// answer come those for every key that may follow, so most keys are answered before the server hears of them.

import { accept, beginsSentence, cased, tally, typed, wordAt } from "/typing.js";

const LAYERS = {
  letters: ["qwertyuiop", "asdfghjkl", "⇧zxcvbnm⌫", "#,␣.⏎"],
  signs: ["1234567890", "-/:;()&@\"", "*?!'%+=⌫", "#,␣.⏎"],
};
const NAMES = { "⇧": "Shift", "⌫": "Delete", "#": "Numbers", "␣": "Space", "⏎": "Return", ",": "Comma", ".": "Full stop" };
const REMEMBERED = 4000;

const $ = (id) => document.getElementById(id);
const text = $("text");
const state = { models: [], layer: "letters", shift: true, held: false, taps: 0, spaceIsOurs: false };
const offers = new Map(); // what was suggested after each beginning; in this page's memory only
let ahead = { text: null, keys: [] };

function make(tag, className, content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (content !== undefined) made.textContent = content;
  if (tag === "button") made.type = "button";
  return made;
}

const before = () => text.value.slice(0, text.selectionStart);

function write(left) {
  const right = text.value.slice(text.selectionEnd);
  text.value = (left + right).slice(0, text.maxLength);
  text.setSelectionRange(left.length, left.length);
  changed();
}

// ---- keys

function drawKeys() {
  const rows = LAYERS[state.layer].map((row) => {
    const drawn = make("div", "row");
    drawn.append(...[...row].map(drawKey));
    return drawn;
  });
  $("keys").replaceChildren(...rows);
  $("keys").querySelector("button").tabIndex = 0;
}

function drawKey(key) {
  const shown = { "␣": "space", "⏎": "return", "#": state.layer === "letters" ? "123" : "ABC" }[key] ?? key;
  const button = make("button", "key", state.shift && state.layer === "letters" ? upper(shown, key) : shown);
  button.dataset.key = key;
  button.tabIndex = -1; // one stop for Tab; arrows go from key to key
  if (NAMES[key]) button.setAttribute("aria-label", key === "#" && state.layer === "signs" ? "Letters" : NAMES[key]);
  if (NAMES[key] && key !== "," && key !== ".") button.classList.add("wide", { "␣": "space", "⏎": "return" }[key] ?? "side");
  if (key === "⇧") button.setAttribute("aria-pressed", String(state.shift));
  button.addEventListener("pointerdown", (event) => event.preventDefault()); // the cursor stays in the text
  button.addEventListener("click", () => press(key));
  if (key === "⌫") repeats(button, () => press(key));
  return button;
}

const upper = (shown, key) => (NAMES[key] ? shown : shown.toUpperCase());

function repeats(button, action) {
  let timer = 0;
  const stop = () => clearTimeout(timer);
  const again = () => { action(); timer = setTimeout(again, 70); };
  button.addEventListener("pointerdown", () => { timer = setTimeout(again, 450); });
  for (const end of ["pointerup", "pointerleave", "pointercancel"]) button.addEventListener(end, stop);
}

function press(key) {
  if (key === "⇧") return setShift(!state.shift, true);
  if (key === "#") {
    state.layer = state.layer === "letters" ? "signs" : "letters";
    return drawKeys();
  }
  state.taps += 1;
  const left = before();
  const selected = text.selectionStart !== text.selectionEnd;
  if (key === "⌫") write(selected ? left : [...left].slice(0, -1).join(""));
  else {
    const letter = { "␣": " ", "⏎": "\n" }[key] ?? (state.shift && state.layer === "letters" ? key.toUpperCase() : key);
    write(typed(left, letter, state.spaceIsOurs));
  }
  return undefined;
}

function setShift(on, held = false) {
  state.held = held && on;
  if (state.shift === on) return;
  state.shift = on;
  for (const button of document.querySelectorAll("#keys button")) {
    const key = button.dataset.key;
    if (key === "⇧") button.setAttribute("aria-pressed", String(on));
    else if (state.layer === "letters" && !NAMES[key]) button.textContent = on ? key.toUpperCase() : key;
  }
  drawSuggestions();
}

$("keys").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
  if (!step) return;
  event.preventDefault();
  const keys = [...$("keys").querySelectorAll("button")];
  const from = keys.indexOf(document.activeElement);
  const to = keys[Math.min(Math.max(from + step, 0), keys.length - 1)];
  keys[from].tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
});

// ---- a real keyboard: the text field takes it; we only show the key go down and tidy the space before a full stop

text.addEventListener("beforeinput", (event) => {
  if (event.inputType.startsWith("insert") || event.inputType.startsWith("delete")) state.taps += 1;
  if (event.inputType === "insertText" && event.data && event.data.length === 1 && state.spaceIsOurs) {
    const left = before();
    const tidy = typed(left, event.data, true);
    if (tidy !== left + event.data) {
      event.preventDefault();
      write(tidy);
    }
  }
});
text.addEventListener("input", changed);
document.addEventListener("selectionchange", () => {
  if (document.activeElement === text && before() !== asked) ask(performance.now());
});
for (const [event, down] of [["keydown", true], ["keyup", false]]) {
  document.addEventListener(event, (e) => {
    const key = { Backspace: "⌫", Enter: "⏎", " ": "␣", Shift: "⇧" }[e.key] ?? e.key.toLowerCase();
    document.querySelector(`#keys [data-key="${CSS.escape(key)}"]`)?.classList.toggle("down", down);
  });
}
window.addEventListener("blur", () => document.querySelectorAll(".down").forEach((key) => key.classList.remove("down")));

// ---- suggestions

let asked = null;
let waiting = false;
let behind = null;

/** After each change: count, and ask what comes next. */
function changed() {
  const began = performance.now();
  state.spaceIsOurs = false;
  setShift(beginsSentence(before()));
  foresee(before());
  if (offers.has(before())) shown(began);
  ask(began);
  count(); // while the question is on its way
}

/** If the last answer foresaw this key, its suggestions are known. */
function foresee(left) {
  const key = left.slice(-1).toLowerCase();
  if (left.slice(0, -1) !== ahead.text || !/[\p{L}\p{N} ]/u.test(key)) return;
  if (key === " " && !ahead.keys.every((keys) => keys[" "])) return; // a second space
  remember(left, ahead.keys.map((keys) => keys[key] ?? []));
}

function shown(began) {
  drawSuggestions();
  performance.measure("keystroke", { start: began });
}

async function ask(began) {
  asked = before();
  if (waiting) {
    behind = began; // the newest question waits; those between are never asked
    return;
  }
  waiting = true;
  const question = asked;
  let fresh = false;
  try {
    const answer = await fetch("/suggest", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ text: question }),
    });
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const known = await answer.json();
    ahead = { text: question, keys: known.ahead };
    fresh = !offers.has(question);
    remember(question, known.suggestions);
    trouble("");
  } catch {
    trouble("The keyboard's server does not answer. Is `unheard keyboard` still running?");
  }
  waiting = false;
  if (question === before() && fresh) shown(began);
  if (behind !== null) {
    const next = behind;
    behind = null;
    if (before() !== question) ask(next);
  }
}

function remember(question, suggestions) {
  offers.delete(question);
  offers.set(question, suggestions);
  if (offers.size > REMEMBERED) offers.delete(offers.keys().next().value);
}

function drawSuggestions() {
  const found = offers.get(before());
  if (!found) return;
  const { begun } = wordAt(before());
  const sets = found.map((row) => new Set(row.map((one) => one.word)));
  state.models.forEach((model, m) => {
    model.buttons.forEach((button, i) => {
      const one = found[m][i];
      const alone = one && sets.some((set, n) => n !== m && !set.has(one.word));
      button.disabled = !one;
      button.firstChild.textContent = one ? cased(one.word, begun, state.shift) : "";
      button.lastChild.style.inlineSize = one ? `${Math.max(4, Math.round(100 * one.share))}%` : "0";
      button.classList.toggle("alone", Boolean(alone));
      button.title = one ? `${(100 * one.share).toFixed(1)} % of the model's belief` : "";
    });
  });
  speak(found);
}

let speaking = 0;
function speak(found) {
  clearTimeout(speaking); // only when typing rests, or a screen reader would never be silent
  speaking = setTimeout(() => {
    const rows = state.models.map((model, m) => `${model.name}: ${found[m].map((one) => one.word).join(", ") || "nothing"}`);
    $("spoken").textContent = `Suggestions. ${rows.join(". ")}.`;
  }, 700);
}

function take(button) {
  const word = button.firstChild.textContent;
  if (!word) return;
  state.taps += 1;
  write(accept(before(), word));
  state.spaceIsOurs = true;
}

// ---- what was saved

function count() {
  const counts = tally(text.value, offers, state.models.length);
  state.models.forEach((model, m) => {
    const { saved, keys } = counts[m];
    const share = keys ? Math.round((100 * saved) / keys) : 0;
    model.meter.setAttribute("aria-valuenow", share);
    model.meter.firstChild.style.inlineSize = `${share}%`;
    model.saved.textContent = keys ? `Would have saved ${saved} of ${keys} keystrokes (${share} %)` : "No finished word yet";
  });
  const letters = [...text.value].length;
  $("taps").textContent = letters ? `${state.taps} taps for ${letters} characters` : "No key yet";
}

$("clear").addEventListener("click", () => {
  text.value = "";
  state.taps = 0;
  offers.clear();
  changed();
  text.focus();
});

// ---- the models

function drawModel(about, m) {
  const strip = make("div", `strip model-${m}`);
  strip.setAttribute("role", "group");
  strip.setAttribute("aria-label", `Suggestions of ${about.name}`);
  const buttons = [0, 1, 2].map(() => {
    const button = make("button", "suggestion");
    button.append(make("span", "word"), make("span", "bar"));
    button.disabled = true;
    button.addEventListener("pointerdown", (event) => event.preventDefault());
    button.addEventListener("click", () => take(button));
    return button;
  });
  strip.append(make("span", "who", about.name), ...buttons);
  $("strips").append(strip);

  const card = make("article", `card model-${m}`);
  const head = make("div", "head");
  const badge = make("span", `badge ${about.grade}`, about.badge);
  head.append(make("h2", "", about.name), badge);
  const meter = make("div", "meter");
  meter.append(make("span"));
  const described = { role: "meter", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": 0 };
  described["aria-label"] = `Share of keystrokes that ${about.name} would have saved, in percent`;
  for (const [name, value] of Object.entries(described)) meter.setAttribute(name, value);
  const saved = make("p", "saved", "No finished word yet");
  const promise = make("div", "promise");
  promise.append(make("h3", "", about.headline), ...about.sentences.map((one) => make("p", "", one)));
  promise.append(...about.warnings.map((one) => make("p", "warning", one)));
  const more = make("details");
  more.append(make("summary", "", "In full"), make("p", "", `${about.claim}.`));
  more.append(make("p", "", `${about.kind[0].toUpperCase()}${about.kind.slice(1)}; ${about.words.toLocaleString("en")} words.`));
  card.append(head, meter, saved, promise, more);
  $("models").append(card);
  return { name: about.name, buttons, meter, saved };
}

function trouble(message) {
  document.querySelector(".trouble")?.remove();
  if (message) $("strips").prepend(Object.assign(make("p", "trouble", message), { role: "alert" }));
}

async function begin() {
  // Where fingers type, only this keyboard should open; a real one still works.
  if (matchMedia("(pointer: coarse)").matches) text.inputMode = "none";
  drawKeys();
  try {
    const { models } = await (await fetch("/about")).json();
    state.models = models.map(drawModel);
    if (models.length > 1) $("strips").append(make("p", "hint", "In colour: suggested by one of the two only."));
    document.body.dataset.models = models.length;
    document.body.dataset.ready = "yes";
    changed();
    if (!matchMedia("(pointer: coarse)").matches) text.focus();
  } catch {
    trouble("The keyboard's server does not answer. Is `unheard keyboard` still running?");
  }
}

begin();
