// Suggestions: one question to the server at a time, and the latest answer on the screen. With an answer come those for every key
// that may follow, so most keys are answered before the server hears of them.

import { setShift } from "/keys.js";
import { $, before, state, text, trouble, write } from "/state.js";
import { accept, beginsSentence, cased, follow, tally, wordAt } from "/typing.js";

const REMEMBERED = 4000;
const offers = new Map(); // what was suggested after each beginning; in this page's memory only
let ahead = { text: null, keys: [] };
let drawn = null; // the text whose suggestions are on the screen
let asked = null;
let waiting = false;
let behind = null;

/** After each change: show what was foreseen, and ask what comes next. */
export function changed() {
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
  if (ahead.keys.includes(null)) return; // a model too slow to answer before it is asked
  const key = left.slice(-1).toLowerCase();
  if (left.slice(0, -1) !== ahead.text || !/[\p{L}\p{N} ]/u.test(key)) return;
  if (key === " " && !ahead.keys.every((keys) => keys[" "])) return; // a second space
  remember(left, ahead.keys.map((keys) => keys[key] ?? []));
}

function shown(began) {
  drawSuggestions();
  performance.measure("keystroke", { start: began });
  measured += 1;
  if (measured % 5000 === 0) performance.clearMeasures("keystroke");
}

let measured = 0;

async function ask(began) {
  asked = before();
  if (waiting) {
    behind = began; // the newest question waits; those between are never asked
    return;
  }
  waiting = true;
  const question = asked;
  try {
    const answer = await fetch("/suggest", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ text: question }),
    });
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const known = await answer.json();
    ahead = { text: question, keys: known.ahead };
    remember(question, known.suggestions);
    trouble("");
  } catch {
    trouble("The keyboard's server does not answer. Is `unheard keyboard` still running?");
  }
  waiting = false;
  if (question === before() && question !== drawn && offers.has(question)) shown(began);
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
  drawn = before();
  $("strips").dataset.after = drawn.length; // how much of the text these are for: what is older is not taken
  const { begun } = wordAt(before());
  const sets = found.map((row) => new Set(row.map((one) => one.word)));
  state.models.forEach((model, m) => {
    model.buttons.forEach((button, i) => {
      const one = found[m][i];
      const alone = one && sets.some((set, n) => n !== m && !set.has(one.word));
      button.disabled = !one;
      button.firstChild.textContent = one ? cased(one.word, one.follows ? "" : begun, !one.follows && state.shift) : "";
      button.dataset.follows = one?.follows ? "yes" : "";
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

export function take(button) {
  const word = button.firstChild.textContent;
  if (!word || drawn !== before()) return; // the text has moved on: this word was for another place
  state.taps += 1;
  write(button.dataset.follows ? follow(before(), word) : accept(before(), word));
  state.spaceIsOurs = true;
}

export function forget() {
  offers.clear();
  drawn = null;
  ahead = { text: null, keys: [] };
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

text.addEventListener("input", changed);
text.addEventListener("shifted", drawSuggestions);
document.addEventListener("selectionchange", () => {
  if (document.activeElement !== text || before() === asked) return; // the cursor moved without a key
  drawSuggestions();
  ask(performance.now());
});
