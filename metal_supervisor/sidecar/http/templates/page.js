"use strict";
// Puts the content of a younger page in the place of this one's. It rests while the page is hidden.
(() => {
  const everyMs = 3000, patienceMs = 10000;
  const page = document.documentElement, note = document.getElementById("note");
  let timer = 0, answered = new Date();

  const swap = (fresh, selector) => {
    const before = document.querySelector(selector), after = fresh.querySelector(selector);
    // What has not changed stays, so that a selected text stays selected.
    if (before && after && before.innerHTML !== after.innerHTML) before.replaceWith(after);
  };

  const look = async () => {
    try {
      const answer = await fetch("/", { cache: "no-store", signal: AbortSignal.timeout(patienceMs) });
      if (!answer.ok) throw new Error(String(answer.status));
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (fresh.documentElement.dataset.edition !== page.dataset.edition) return location.reload();
      document.title = fresh.title;
      swap(fresh, "#state");
      swap(fresh, "main");
      answered = new Date();
      note.textContent = "";
    } catch {
      note.textContent = `No answer since ${answered.toLocaleTimeString()}: this may be out of date.`;
    }
    again(everyMs);
  };

  const again = (ms) => {
    clearTimeout(timer);
    if (!document.hidden) timer = setTimeout(look, ms);
  };

  document.addEventListener("visibilitychange", () => again(0));
  again(everyMs);
})();
