// What the parts of the page share: the text, the models, and a few words for building elements.

export const $ = (id) => document.getElementById(id);
export const text = $("text");
export const state = { models: [], layer: "letters", shift: true, taps: 0, spaceIsOurs: false };

export function make(tag, className, content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (content !== undefined) made.textContent = content;
  if (tag === "button") made.type = "button";
  return made;
}

export const before = () => text.value.slice(0, text.selectionStart);

/** Put the text up to the cursor in place; whoever listens for "input" hears of it, as if it had been typed. */
export function write(left) {
  const right = text.value.slice(text.selectionEnd);
  text.value = (left + right).slice(0, text.maxLength);
  text.setSelectionRange(left.length, left.length);
  text.dispatchEvent(new Event("input"));
}

export function trouble(message) {
  document.querySelector(".trouble")?.remove();
  if (message) $("strips").prepend(Object.assign(make("p", "trouble", message), { role: "alert" }));
}
