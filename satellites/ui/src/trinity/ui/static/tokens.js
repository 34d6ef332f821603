// The further tokens of a long response: asked for before one has scrolled to them, and put in with the next frame.
"use strict";
(() => {
  const AHEAD = "1200px", AGAIN_MS = 1000;
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((one) => one.isIntersecting)) {
      seen.unobserve(entry.target);
      more(entry.target).catch(() => setTimeout(() => seen.observe(entry.target), AGAIN_MS));
    }
  }, { rootMargin: AHEAD });
  const more = async (place) => {
    const answer = await fetch(place.dataset.more);
    if (!answer.ok) throw new Error(answer.status);
    const made = document.createElement("template");
    made.innerHTML = await answer.text();
    requestAnimationFrame(() => {
      place.replaceWith(made.content);
      watch();
    });
  };
  const watch = () => document.querySelectorAll("[data-more]").forEach((place) => seen.observe(place));
  watch();
})();
