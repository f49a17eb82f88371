// Rules of typing as pure functions of text, without access to the page: the word at the cursor, its case, and the number of keys
// that suggestions would have saved.

const LETTER = /[\p{L}\p{M}\p{N}'’]/u;
const TIGHT = /[.,!?;:)\]}%…]/;

/** The word that is being typed at the end of a text, and the position where it begins. */
export function wordAt(text) {
  let at = text.length;
  while (at > 0 && LETTER.test(text[at - 1])) at -= 1;
  while (at < text.length && /['’]/.test(text[at])) at += 1;
  return { begun: text.slice(at), start: at };
}

/** Whether a sentence begins at the end of a text. If so, the shift key turns on by itself, as on a phone. */
export function beginsSentence(text) {
  return /(^|[.!?…]\s+|\n)$/.test(text);
}

/** A suggestion in the case of the typed letters: all capitals, a capital first, or as it is. */
export function cased(word, begun, shifted) {
  const capital = word.charAt(0).toUpperCase() + word.slice(1);
  if (begun.length > 1 && begun === begun.toUpperCase() && begun !== begun.toLowerCase()) return word.toUpperCase();
  if (begun) return begun[0] !== begun[0].toLowerCase() ? capital : word;
  return shifted ? capital : word;
}

/** The text with the word that is being typed replaced by a suggestion, and a space after it. */
export function accept(before, word) {
  const { begun, start } = wordAt(before);
  const glue = !begun && before && !/[\s([{“"'’]$/.test(before) ? " " : "";
  return before.slice(0, start) + glue + word + " ";
}

/** The text with a suggestion added after its finished last word, and a space after it. */
export function follow(before, word) {
  return `${before} ${word} `;
}

/** The text after a key. A full stop or another closing sign right after a suggestion replaces the space that came with it. */
export function typed(before, key, spaceIsOurs) {
  return spaceIsOurs && TIGHT.test(key) && before.endsWith(" ") ? before.slice(0, -1) + key : before + key;
}

/** For each model, the number of keys that its suggestions would have saved in the finished words, and the number of keys that
 *  these words take without suggestions. `offers` has the suggestions by the text before the cursor. If a word was suggested after
 *  L of its letters, it takes L + 1 keys, because the tap also writes the space. Typed in full, it takes all its letters and the
 *  space. */
export function tally(text, offers, models) {
  const counts = Array.from({ length: models }, () => ({ saved: 0, keys: 0 }));
  for (const found of text.matchAll(/[\p{L}\p{M}\p{N}]+(?:['’][\p{L}\p{M}\p{N}]+)*(?=[^\p{L}\p{M}\p{N}'’])/gu)) {
    const word = found[0].toLowerCase().replaceAll("’", "'");
    const seen = [...word].map((_, L) => offers.get(text.slice(0, found.index + L)));
    if (!seen.some(Boolean)) continue; // the word was pasted, so no suggestions were requested
    counts.forEach((count, m) => {
      const L = seen.findIndex((offer) => offer && offer[m].some((one) => !one.follows && one.word.toLowerCase() === word));
      count.keys += word.length + 1;
      if (L >= 0) count.saved += word.length - L;
    });
  }
  return counts;
}
