// The keys on the screen and a physical keyboard. Both write into the text field.

import { $, before, make, state, text, write } from "/state.js";
import { typed } from "/typing.js";

const LAYERS = {
  letters: ["qwertyuiop", "asdfghjkl", "⇧zxcvbnm⌫", "#,␣.⏎"],
  signs: ["1234567890", "-/:;()&@\"", "*?!'%+=⌫", "#,␣.⏎"],
};
const NAMES = { "⇧": "Shift", "⌫": "Delete", "#": "Numbers", "␣": "Space", "⏎": "Return", ",": "Comma", ".": "Full stop" };

export function drawKeys() {
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
  button.tabIndex = -1; // Tab reaches only one key; the arrow keys move between keys
  if (NAMES[key]) button.setAttribute("aria-label", key === "#" && state.layer === "signs" ? "Letters" : NAMES[key]);
  if (NAMES[key] && key !== "," && key !== ".") button.classList.add("wide", { "␣": "space", "⏎": "return" }[key] ?? "side");
  if (key === "⇧") button.setAttribute("aria-pressed", String(state.shift));
  button.addEventListener("pointerdown", (event) => event.preventDefault()); // keep the focus in the text field
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
  if (key === "⇧") return setShift(!state.shift);
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

export function setShift(on) {
  if (state.shift === on) return;
  state.shift = on;
  for (const button of document.querySelectorAll("#keys button")) {
    const key = button.dataset.key;
    if (key === "⇧") button.setAttribute("aria-pressed", String(on));
    else if (state.layer === "letters" && !NAMES[key]) button.textContent = on ? key.toUpperCase() : key;
  }
  text.dispatchEvent(new Event("shifted")); // the suggestions change to the new case
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

// ---- A physical keyboard. The browser writes its letters into the text field. This code highlights the pressed key, and removes
// the space that followed a suggestion if a full stop comes next.

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
for (const [event, down] of [["keydown", true], ["keyup", false]]) {
  document.addEventListener(event, (e) => {
    const key = { Backspace: "⌫", Enter: "⏎", " ": "␣", Shift: "⇧" }[e.key] ?? e.key.toLowerCase();
    document.querySelector(`#keys [data-key="${CSS.escape(key)}"]`)?.classList.toggle("down", down);
  });
}
window.addEventListener("blur", () => document.querySelectorAll(".down").forEach((key) => key.classList.remove("down")));
