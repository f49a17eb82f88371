// What typing means, without a page around it: the word at the cursor, its case, and how many keys suggestions would have saved.

const LETTER = /[\p{L}\p{M}\p{N}'’]/u;
const TIGHT = /[.,!?;:)\]}%…]/;

/** The word being written just before the cursor, and where it begins. */
export function wordAt(text) {
  let at = text.length;
  while (at > 0 && LETTER.test(text[at - 1])) at -= 1;
  while (at < text.length && /['’]/.test(text[at])) at += 1;
  return { begun: text.slice(at), start: at };
}

/** Does a sentence begin here? Then a phone puts the shift key down by itself. */
export function beginsSentence(text) {
  return /(^|[.!?…]\s+|\n)$/.test(text);
}

/** A suggestion in the case of what is typed already. */
export function cased(word, begun, shifted) {
  const capital = word.charAt(0).toUpperCase() + word.slice(1);
  if (begun.length > 1 && begun === begun.toUpperCase() && begun !== begun.toLowerCase()) return word.toUpperCase();
  if (begun) return begun[0] !== begun[0].toLowerCase() ? capital : word;
  return shifted ? capital : word;
}

/** The text with a suggestion put in place of the word begun, and a space after it. */
export function accept(before, word) {
  const { begun, start } = wordAt(before);
  const glue = !begun && before && !/[\s([{“"'’]$/.test(before) ? " " : "";
  return before.slice(0, start) + glue + word + " ";
}

/** The text with a suggestion after the finished word at its end, and a space after it. */
export function follow(before, word) {
  return `${before} ${word} `;
}

/** A full stop right after a suggestion belongs to its word: the space that came with it goes. */
export function typed(before, key, spaceIsOurs) {
  return spaceIsOurs && TIGHT.test(key) && before.endsWith(" ") ? before.slice(0, -1) + key : before + key;
}

/** For each model: keys that it would have saved in the finished words, and the keys that these words take without help.
 *  `offers` remembers what was suggested after each beginning of this text. A word offered after L of its letters costs L + 1
 *  keys (the tap brings its space); typed out it costs all its letters and the space. */
export function tally(text, offers, models) {
  const counts = Array.from({ length: models }, () => ({ saved: 0, keys: 0 }));
  for (const found of text.matchAll(/[\p{L}\p{M}\p{N}]+(?:['’][\p{L}\p{M}\p{N}]+)*(?=[^\p{L}\p{M}\p{N}'’])/gu)) {
    const word = found[0].toLowerCase().replaceAll("’", "'");
    const seen = [...word].map((_, L) => offers.get(text.slice(0, found.index + L)));
    if (!seen.some(Boolean)) continue; // pasted: nobody was asked
    counts.forEach((count, m) => {
      const L = seen.findIndex((offer) => offer && offer[m].some((one) => !one.follows && one.word.toLowerCase() === word));
      count.keys += word.length + 1;
      if (L >= 0) count.saved += word.length - L;
    });
  }
  return counts;
}
