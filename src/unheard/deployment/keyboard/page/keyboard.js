// Starts the page. Each model gets a strip of suggestions above the keys and a card with its privacy guarantee.

import { drawKeys } from "/keys.js";
import { $, make, state, text, trouble } from "/state.js";
import { changed, forget, take } from "/suggesting.js";

$("clear").addEventListener("click", () => {
  text.value = "";
  state.taps = 0;
  forget();
  changed();
  text.focus();
});

// ---- the models

function drawModel(about, m) {
  const strip = make("div", `strip model-${m} tint-${about.colour}`);
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

  const card = make("article", `card model-${m} tint-${about.colour}`);
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

async function begin() {
  // On a touch screen, do not open the device's own keyboard. A physical keyboard still works.
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
