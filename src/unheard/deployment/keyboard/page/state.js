// What the other scripts share: the text field, the state of the keyboard, and functions that create elements.
// `state.spaceIsOurs` is true right after a suggestion was taken, whose space the user did not type.

export const $ = (id) => document.getElementById(id);
export const text = $("text");
export const state = { models: [], layer: "letters", shift: true, taps: 0, spaceIsOurs: false };

/** Create an element with a class and a text. */
export function make(tag, className, content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (content !== undefined) made.textContent = content;
  if (tag === "button") made.type = "button";
  return made;
}

/** The text before the cursor. */
export const before = () => text.value.slice(0, text.selectionStart);

/** Replace the text before the cursor, and the selection, by `left`. Fires "input", as if the user had typed. */
export function write(left) {
  const right = text.value.slice(text.selectionEnd);
  text.value = (left + right).slice(0, text.maxLength);
  text.setSelectionRange(left.length, left.length);
  text.dispatchEvent(new Event("input"));
}

/** Show an error message above the suggestions. An empty message removes it. */
export function trouble(message) {
  document.querySelector(".trouble")?.remove();
  if (message) $("strips").prepend(Object.assign(make("p", "trouble", message), { role: "alert" }));
}
