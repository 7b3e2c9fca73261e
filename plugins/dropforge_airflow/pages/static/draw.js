// Building pages from values. Text only ever becomes text: nothing here takes HTML.

export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

function svg(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** A link that opens beside Airflow; the bare text where there is no web address. */
export function link(url, text) {
  if (!/^https?:\/\//.test(url ?? "")) return el("span", {}, text);
  return el("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, text);
}

/** A link to one of Airflow's own pages, which replaces the one around this frame. */
export function inside(path, text) {
  const base = new URL("../../../", location.href);
  return el("a", { href: new URL(path, base).href, target: "_top" }, text);
}

export function number(value) {
  if (typeof value === "string") return value;
  if (typeof value !== "number") return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : size >= 0.001 ? value.toPrecision(4) : value.toExponential(2);
}

export function bytes(value) {
  if (typeof value !== "number") return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (value >= 1000 && place < units.length - 1) [value, place] = [value / 1000, place + 1];
  return `${place ? value.toPrecision(3) : value} ${units[place]}`;
}

/** How long something took; of what still runs, it is shown again each second. */
export function lasted(began, ended) {
  if (!began) return "";
  return ended ? span(new Date(ended) - new Date(began)) : el("span", { "data-began": began }, span(Date.now() - new Date(began)));
}

function span(milliseconds) {
  const seconds = Math.max(0, Math.round(milliseconds / 1000));
  if (seconds < 90) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 90 ? `${minutes} min ${seconds % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

setInterval(() => {
  for (const item of document.querySelectorAll("[data-began]")) item.textContent = span(Date.now() - new Date(item.dataset.began));
}, 1000);

export function moment(text) {
  return text ? el("time", { datetime: text, title: text }, new Date(text).toLocaleString("sv")) : "";
}

export function state(text) {
  return el("span", { class: "state", "data-state": text || "none" }, text || "not begun");
}

export function card(title, id, ...children) {
  return el("section", { class: "card", id }, el("h2", {}, title), ...children);
}

export function table(heads, rows, name = "") {
  const cell = (value, kind) => el(kind, typeof value === "number" ? { class: "number" } : {}, typeof value === "number" ? number(value) : value);
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      { class: name },
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value) => cell(value ?? "–", "td"))))),
    ),
  );
}

/** A curve over optimizer steps, with its first, last and extreme values written at it. */
export function curve(title, points, place) {
  const finite = points.filter(([, value]) => typeof value === "number");
  const figure = el("figure", { class: "curve", id: place });
  const last = points.at(-1)?.[1];
  figure.append(el("figcaption", {}, el("span", {}, title), el("b", {}, last === undefined ? "" : number(last))));
  if (finite.length === 0) {
    figure.append(el("p", { class: "quiet" }, "nothing logged yet"));
    return figure;
  }
  const [width, height, pad] = [400, 110, 6];
  const steps = finite.map(([step]) => step);
  const values = finite.map(([, value]) => value);
  const [first, end] = [Math.min(...steps), Math.max(...steps)];
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (step) => pad + ((step - first) / (end - first || 1)) * (width - 2 * pad);
  const y = (value) => height - pad - ((value - low) / (high - low || 1)) * (height - 2 * pad);
  const path = finite.map(([step, value], index) => `${index ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const label = `${title}: ${finite.length} points from step ${first} to ${end}, last ${number(values.at(-1))}`;
  const shape = svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("path", { d: path, class: "line", "vector-effect": "non-scaling-stroke" }),
  );
  if (finite.length === 1) shape.append(svg("circle", { cx: x(first), cy: y(low), r: 3, class: "dot" }));
  figure.append(
    el("div", { class: "plot" }, el("span", { class: "axis high" }, number(high)), el("span", { class: "axis low" }, number(low)), shape),
    el("div", { class: "steps" }, el("span", {}, `step ${first}`), el("span", {}, `step ${end}`)),
  );
  return figure;
}

/** Follow Airflow's theme; alone in a window, the system's. */
export function followTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let outer = null;
  try {
    if (window.parent !== window) outer = window.parent.document.documentElement;
  } catch {
    outer = null; // a frame of another page
  }
  const apply = () => {
    const dark = outer ? outer.classList.contains("dark") : system.matches;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
  };
  if (outer) document.documentElement.dataset.framed = "";
  apply();
  system.addEventListener("change", apply);
  if (outer) new MutationObserver(apply).observe(outer, { attributes: true, attributeFilter: ["class"] });
}

/** Put sections into the page; one whose values are the same as before stays, so that a selection in it survives. */
export function sections(page, parts) {
  const wanted = parts.filter((part) => part !== null);
  page.querySelectorAll(":scope > [data-part]").forEach((old) => {
    if (!wanted.some(([name]) => name === old.dataset.part)) old.remove();
  });
  page.querySelectorAll(":scope > :not([data-part])").forEach((old) => old.remove());
  wanted.forEach(([name, values, draw], place) => {
    const key = JSON.stringify(values);
    let holder = [...page.children].find((child) => child.dataset.part === name);
    if (holder === undefined) holder = el("div", { "data-part": name });
    if (holder.dataset.key !== key) {
      holder.replaceChildren(draw());
      holder.dataset.key = key;
    }
    if (page.children[place] !== holder) page.insertBefore(holder, page.children[place] ?? null);
  });
}

/** Ask for the page's values again and again; less often when nothing moves, not at all while the page is hidden. */
export function poll(address, show, { quick = 3000, slow = 30000 } = {}) {
  let timer = null;
  const told = document.getElementById("trouble");
  const tell = (text) => {
    told.textContent = text;
    told.hidden = !text;
  };
  const ask = async () => {
    timer = null;
    let pause = slow;
    try {
      const answer = await fetch(address(), { credentials: "same-origin", headers: { Accept: "application/json" } });
      if (answer.ok) {
        const values = await answer.json();
        tell("");
        show(values);
        pause = values.live ? quick : slow;
      } else if (answer.status === 401) tell("Your login has ended: reload Airflow and log in again.");
      else if (answer.status === 403) tell("You may not see this: it takes the right to read the runs of this DAG.");
      else {
        const { detail } = await answer.json().catch(() => ({}));
        tell(typeof detail === "string" ? detail : `Airflow answers with ${answer.status}.`);
        if (answer.status >= 500) pause = 2 * quick;
      }
    } catch {
      tell("Airflow does not answer; trying again.");
      pause = 2 * quick;
    }
    if (!document.hidden) timer = setTimeout(ask, pause);
  };
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && timer === null) timer = setTimeout(ask, 0);
  });
  ask();
  return () => {
    clearTimeout(timer);
    ask();
  };
}
