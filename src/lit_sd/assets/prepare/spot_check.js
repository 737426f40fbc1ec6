"use strict";
const cards = JSON.parse(document.getElementById("cards").textContent);
const store = JSON.parse(document.getElementById("store").textContent);
const at = (id) => document.getElementById(id);
let answers = new Map(); // by id, in the order in which they were given
try {
  answers = new Map(JSON.parse(localStorage.getItem(store)) || []);
} catch {
  answers = new Map(); // a browser without storage for files: answers last as long as the page
}

function remember() {
  try {
    localStorage.setItem(store, JSON.stringify([...answers]));
  } catch {
    /* see above */
  }
}

function current() {
  return cards.find((card) => !answers.has(card.id));
}

function show() {
  const card = current();
  at("bar").value = answers.size;
  at("count").textContent = `${answers.size} of ${cards.length} answered`;
  at("card").hidden = !card;
  at("done").hidden = Boolean(card);
  at("undo").disabled = answers.size === 0;
  at("keep").disabled = at("refuse").disabled = !card;
  if (!card) return;
  at("picture").src = card.picture || "";
  at("name").textContent = card.id;
  at("size").textContent = card.size || card.error || "";
  at("captions").replaceChildren(
    ...card.captions.map((text) => {
      const line = document.createElement("p");
      line.textContent = text;
      return line;
    }),
  );
  at("beside").hidden = !card.other;
  if (card.other) {
    at("other").src = card.other.picture || "";
    at("question").textContent = card.question;
    at("otherid").textContent = card.other.id;
    at("othersize").textContent = card.other.size || "";
  }
}

function answer(said) {
  const card = current();
  if (!card) return;
  answers.set(card.id, said);
  remember();
  show();
}

function undo() {
  answers.delete([...answers.keys()].pop());
  remember();
  show();
}

function save() {
  const text = JSON.stringify({ answers: Object.fromEntries(answers) }, null, 1) + "\n";
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = "answers.json";
  link.click();
  URL.revokeObjectURL(link.href);
}

at("keep").addEventListener("click", () => answer("keep"));
at("refuse").addEventListener("click", () => answer("refuse"));
at("undo").addEventListener("click", undo);
at("save").addEventListener("click", save);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = { ArrowRight: "keep", k: "keep", ArrowLeft: "refuse", r: "refuse" };
  if (event.key in keys) answer(keys[event.key]);
  else if (event.key === "u" || event.key === "Backspace") undo();
  else return;
  event.preventDefault();
});

// A swipe answers, as the arrows do.
let touched = null;
at("view").addEventListener("touchstart", (event) => {
  touched = event.changedTouches[0].clientX;
}, { passive: true });
at("view").addEventListener("touchend", (event) => {
  const moved = event.changedTouches[0].clientX - touched;
  if (Math.abs(moved) < 60) return; // a tap
  event.preventDefault();
  answer(moved > 0 ? "keep" : "refuse");
});
show();
