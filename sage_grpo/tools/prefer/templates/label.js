"use strict";

// The page of a rater. The server decides what is shown; this script shows it and sends answers.

const token = new URLSearchParams(location.search).get("token");
const byId = (id) => document.getElementById(id);
const videos = [byId("left"), byId("right")];
const questions = [...document.querySelectorAll(".question")];
const SPEEDS = [1, 0.5, 0.25];
const DRIFT = 0.08; // seconds between the two clips that are corrected

let state = null; // as the server sent it
let answers = {}; // of the questions answered so far
let shownAt = 0; // when both clips began to play
let ready = false; // whether answers are taken
let speed = 0; // index into SPEEDS
let queue = Promise.resolve(); // requests that are under way
const loaded = new Map(); // number of a clip -> promise of its address in memory

// the server

async function ask(path, body) {
  const response = await fetch(path, {
    method: "POST",
    headers: { Authorization: "Bearer " + token, "Content-Type": "application/json" },
    body: JSON.stringify(body ?? {}),
  });
  const value = await response.json();
  if (!response.ok) {
    throw Object.assign(new Error(value.error), { status: response.status });
  }
  return value;
}

async function fetchClip(number) {
  const response = await fetch("/clips/" + number, { headers: { Authorization: "Bearer " + token } });
  if (!response.ok) {
    throw new Error("a clip could not be loaded");
  }
  return URL.createObjectURL(await response.blob());
}

function clipAddress(number) {
  if (!loaded.has(number)) {
    const address = fetchClip(number);
    address.catch(() => loaded.delete(number));
    loaded.set(number, address);
  }
  return loaded.get(number);
}

function forgetClips(kept) {
  for (const [number, address] of loaded) {
    if (!kept.includes(number)) {
      loaded.delete(number);
      address.then(URL.revokeObjectURL, () => {});
    }
  }
}

// showing a pair

async function show(next) {
  state = next;
  answers = {};
  ready = false;
  document.body.dataset.ready = "";
  byId("bar").max = state.total;
  byId("bar").value = state.done;
  byId("count").textContent = state.done + " of " + state.total;
  byId("undo").disabled = !state.can_undo;
  const finished = state.trial === undefined;
  byId("labeling").hidden = finished;
  byId("finished").hidden = !finished;
  mark();
  if (finished) {
    videos.forEach((video) => video.pause());
    document.body.dataset.ready = "finished";
    return;
  }

  byId("prompt").textContent = state.prompt;
  const addresses = await Promise.all(state.clips.map(clipAddress));
  if (next !== state) {
    return; // an undo came in between
  }
  await Promise.all(videos.map((video, side) => load(video, addresses[side])));
  arrange();
  await play();
  shownAt = performance.now();
  ready = true;
  document.body.dataset.ready = String(state.trial);
  forgetClips([...state.clips, ...(state.next_clips ?? [])]);
  (state.next_clips ?? []).forEach(clipAddress);
}

function load(video, address) {
  return new Promise((resolve, reject) => {
    video.onloadeddata = resolve;
    video.onerror = () => reject(new Error("a clip could not be played"));
    video.src = address;
    video.load();
  });
}

// Both start from one event and loop together: the one that ends first waits for the other.
async function play() {
  for (const video of videos) {
    video.currentTime = 0;
    video.playbackRate = SPEEDS[speed];
  }
  await Promise.all(videos.map((video) => video.play().catch(() => {})));
}

for (const video of videos) {
  video.addEventListener("ended", () => {
    if (videos.every((each) => each.ended)) {
      play();
    }
  });
}

setInterval(() => {
  const [left, right] = videos;
  const running = videos.every((video) => !video.ended && !video.paused && !video.seeking);
  if (running && Math.abs(left.currentTime - right.currentTime) > DRIFT) {
    right.currentTime = left.currentTime;
  }
}, 250);

// On a narrow screen, wide clips stand one above the other.
function arrange() {
  const wide = videos.some((video) => video.videoWidth > 1.2 * video.videoHeight);
  const stacked = wide && innerWidth < 700;
  byId("stage").classList.toggle("stacked", stacked);
  const names = stacked ? ["Upper", "Lower"] : ["Left", "Right"];
  document.querySelectorAll("[data-choice=left] b").forEach((label) => (label.textContent = names[0]));
  document.querySelectorAll("[data-choice=right] b").forEach((label) => (label.textContent = names[1]));
  document.querySelectorAll("figcaption").forEach((label, side) => (label.textContent = names[side]));
}

addEventListener("resize", arrange);

// answering

function openQuestion() {
  return questions.find((section) => !(section.dataset.question in answers));
}

function mark() {
  const open = openQuestion();
  for (const section of questions) {
    section.classList.toggle("open", section === open);
    for (const button of section.querySelectorAll("button")) {
      const chosen = answers[section.dataset.question] === button.dataset.choice;
      button.setAttribute("aria-pressed", String(chosen));
    }
  }
}

function choose(section, choice) {
  if (!ready || !section) {
    return;
  }
  answers[section.dataset.question] = choice;
  mark();
  if (!openQuestion()) {
    ready = false;
    const seconds = (performance.now() - shownAt) / 1000;
    const body = { trial: state.trial, answers, seconds };
    send("/answer", () => body);
  }
}

function undo() {
  if (Object.keys(answers).length && ready) {
    const given = questions.filter((section) => section.dataset.question in answers);
    delete answers[given[given.length - 1].dataset.question];
    mark();
  } else if (state && state.can_undo) {
    ready = false;
    send("/undo", () => ({ trial: state.last_trial }));
  }
}

// One request at a time: `body` is made when those before are answered, so that an undo takes back the answer before it.
async function send(path, body = () => ({})) {
  let shown;
  const answered = queue.then(() => ask(path, body())).then((next) => {
    shown = show(next); // sets the state at once, then loads clips
  });
  queue = answered.catch(() => {});
  try {
    await answered;
  } catch (error) {
    if (error.status === 409) {
      send("/state"); // answered in another tab
    } else {
      complain("Not stored: " + (error.message || "the server does not answer"));
    }
    return;
  }
  try {
    await shown;
    byId("problem").hidden = true;
  } catch (error) {
    complain("Your answers are stored, but a clip cannot be shown");
  }
}

function complain(problem) {
  byId("problem").textContent = problem + ". Reload the page to try again.";
  byId("problem").hidden = false;
}

// keys and buttons

function slower() {
  speed = (speed + 1) % SPEEDS.length;
  videos.forEach((video) => (video.playbackRate = SPEEDS[speed]));
  byId("slower").firstChild.textContent = speed ? "Speed " + SPEEDS[speed] + " " : "Slower ";
}

function fullScreen() {
  if (document.fullscreenElement) {
    document.exitFullscreen();
  } else {
    byId("stage").requestFullscreen?.().catch(() => {});
  }
}

const KEYS = {
  ArrowLeft: () => choose(openQuestion(), "left"),
  1: () => choose(openQuestion(), "left"),
  ArrowRight: () => choose(openQuestion(), "right"),
  2: () => choose(openQuestion(), "right"),
  ArrowDown: () => choose(openQuestion(), "tie"),
  0: () => choose(openQuestion(), "tie"),
  b: () => choose(openQuestion(), "bad"),
  r: play,
  s: slower,
  f: fullScreen,
  u: undo,
  Backspace: undo,
};

addEventListener("keydown", (event) => {
  const action = KEYS[event.key] ?? KEYS[event.key.toLowerCase()];
  if (action && !event.repeat && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    action();
  }
});

for (const section of questions) {
  section.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) {
      button.blur();
      choose(section, button.dataset.choice);
    }
  });
}
byId("replay").onclick = play;
byId("slower").onclick = slower;
byId("full").onclick = fullScreen;
byId("undo").onclick = undo;

send("/state");
