// Gets suggestions from the server and shows them. One request runs at a time. An answer also has the suggestions for every key
// that may follow, so after most keys the page can show suggestions before the server has answered.

import { setShift } from "/keys.js";
import { $, before, state, text, trouble, write } from "/state.js";
import { accept, beginsSentence, cased, follow, tally, wordAt } from "/typing.js";

const REMEMBERED = 4000;
const offers = new Map(); // the suggestions by the text before the cursor; they are in the memory of this page only
let ahead = { text: null, keys: [] }; // the last answer: the text it is for, and each model's suggestions by next key
let drawn = null; // the text whose suggestions are on the screen
let asked = null; // the text of the newest request, sent or waiting
let waiting = false; // whether a request is running
let behind = null; // the start time of a keystroke whose request waits for the running one; else null

/** After each change of the text: show the suggestions if they are known, and request those for the next key. */
export function changed() {
  const began = performance.now();
  state.spaceIsOurs = false;
  setShift(beginsSentence(before()));
  foresee(before());
  if (offers.has(before())) shown(began);
  ask(began);
  count(); // after the request was sent, so that it does not delay the request
}

/** If the last answer has the suggestions for the key that was typed, remember them for the new text. */
function foresee(left) {
  if (ahead.keys.includes(null)) return; // a model is too slow for suggestions ahead (`PieceSuggester`)
  const key = left.slice(-1).toLowerCase();
  if (left.slice(0, -1) !== ahead.text || !/[\p{L}\p{N} ]/u.test(key)) return;
  if (key === " " && !ahead.keys.every((keys) => keys[" "])) return; // after a second space there are no suggestions ahead
  remember(left, ahead.keys.map((keys) => keys[key] ?? []));
}

/** Show the suggestions, and measure the time since the keystroke began. */
function shown(began) {
  drawSuggestions();
  performance.measure("keystroke", { start: began });
  measured += 1;
  if (measured % 5000 === 0) performance.clearMeasures("keystroke");
}

let measured = 0;

/** Request the suggestions for the text before the cursor. */
async function ask(began) {
  asked = before();
  if (waiting) {
    behind = began; // send the newest text after the running request; texts in between are never sent
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

/** Store the suggestions for a text. The oldest texts are dropped. */
function remember(question, suggestions) {
  offers.delete(question);
  offers.set(question, suggestions);
  if (offers.size > REMEMBERED) offers.delete(offers.keys().next().value);
}

/** Show the suggestions for the text before the cursor, if they are known. */
function drawSuggestions() {
  const found = offers.get(before());
  if (!found) return;
  drawn = before();
  $("strips").dataset.after = drawn.length; // the length of the text that these suggestions are for
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
/** Tell a screen reader the suggestions, 0.7 seconds after the last key: after every key would be too much. */
function speak(found) {
  clearTimeout(speaking);
  speaking = setTimeout(() => {
    const rows = state.models.map((model, m) => `${model.name}: ${found[m].map((one) => one.word).join(", ") || "nothing"}`);
    $("spoken").textContent = `Suggestions. ${rows.join(". ")}.`;
  }, 700);
}

/** Write the suggestion on a button into the text. */
export function take(button) {
  const word = button.firstChild.textContent;
  if (!word || drawn !== before()) return; // the text has changed since: this suggestion was for another text
  state.taps += 1;
  write(button.dataset.follows ? follow(before(), word) : accept(before(), word));
  state.spaceIsOurs = true;
}

/** Drop all suggestions, because the text was cleared. */
export function forget() {
  offers.clear();
  drawn = null;
  ahead = { text: null, keys: [] };
}

// ---- the keystrokes that suggestions would have saved

/** Show how many keystrokes each model would have saved, and how many taps the text took. */
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
  if (document.activeElement !== text || before() === asked) return; // go on only if the cursor moved without a key
  drawSuggestions();
  ask(performance.now());
});
