// Draws each plot from its JSON specification in the page, and lets the reader zoom and move the plots by round with buttons
// and keys.
"use strict";

async function draw(place) {
  const spec = JSON.parse(document.getElementById(place.dataset.spec).textContent);
  const { view } = await vegaEmbed(place, spec, { renderer: "svg", actions: false, tooltip: { sort: null } });
  place.dataset.drawn = "yes";
  if (place.dataset.zoom) makeZoomable(place, view);
}

function makeZoomable(place, view) {
  const whole = place.dataset.zoom.split(",").map(Number);
  const shown = () => view.signal("view_round") || whole;
  const show = (low, high) => {
    const width = Math.min(high - low, whole[1] - whole[0]);
    const begin = Math.max(whole[0], Math.min(low, whole[1] - width));
    place.dataset.shown = [begin, begin + width].join(",");
    view.signal("view_round", [begin, begin + width]).runAsync();
  };
  const zoom = (times) => {
    const [low, high] = shown();
    const middle = (low + high) / 2, half = Math.max((high - low) * times / 2, (whole[1] - whole[0]) / 200);
    show(middle - half, middle + half);
  };
  const move = (part) => { const [low, high] = shown(); show(low + (high - low) * part, high + (high - low) * part); };
  const actions = { in: () => zoom(.5), out: () => zoom(2), left: () => move(-.25), right: () => move(.25), all: () => show(...whole) };
  for (const button of document.querySelectorAll(`[data-for="${place.id}"]`)) {
    button.addEventListener("click", actions[button.dataset.does]);
  }
  const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all" };
  place.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[keys[event.key]]();
  });
}

document.querySelectorAll(".plot").forEach((place) => draw(place).catch((error) => {
  console.error(error);
  place.textContent = "This plot could not be drawn here; the table below has its numbers.";
}));
