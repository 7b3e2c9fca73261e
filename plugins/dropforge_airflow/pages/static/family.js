// The page of the families: versions, champion, drops and what became of each.
import { bytes, card, el, followTheme, inside, link, moment, number, poll, sections, state, table } from "./draw.js";

const page = document.getElementById("page");
const MOST_CHIPS = 60;

function taskPage(v, dagRun) {
  return `dags/${encodeURIComponent(v.dag)}/runs/${encodeURIComponent(dagRun)}`;
}

function choose(v) {
  return el(
    "nav",
    { class: "families", "aria-label": "families" },
    v.families.slice(0, MOST_CHIPS).map((name) => el("a", { href: `?family=${encodeURIComponent(name)}`, "aria-current": name === v.family && "page" }, name)),
    v.families.length > MOST_CHIPS ? el("span", { class: "quiet" }, `and ${v.families.length - MOST_CHIPS} more`) : "",
  );
}

function head(v) {
  const champion = v.versions.find((item) => item.aliases.length);
  return el(
    "header",
    {},
    el("h1", {}, v.family || "Families"),
    champion ? el("span", { class: "good" }, champion.aliases.map((alias) => `${alias}: version ${champion.number}`).join(", ")) : v.family ? el("span", { class: "quiet" }, "no champion yet") : "",
    v.url ? link(v.url, "in MLflow ↗") : "",
  );
}

function versions(v) {
  const rows = v.versions.map((item) => [
    el("span", {}, link(item.url, item.number), item.aliases.map((alias) => el("span", { class: "state", "data-state": "success" }, alias))),
    moment(item.made),
    item.run_url ? link(item.run_url, item.run || "run") : item.run,
    [item.checkpoint ? "a checkpoint" : "", item.rolled_back ? "rolled back" : "", item.previous && item.previous !== "none" ? `took it from version ${item.previous}` : ""].filter(Boolean).join(", "),
    item.verdict,
  ]);
  return card("Versions", "versions", rows.length ? table(["version", "made", "run", "", "verdict"], rows, "versions") : el("p", { class: "quiet" }, "No version is registered yet."));
}

function became(v, drop) {
  if (drop.takers.length === 0) {
    const said = drop.waits ? "waits for a run" : drop.why ? "gets no run" : "no run has taken it";
    return el("span", { class: "warn" }, drop.why ? `${said}: ${drop.why}` : said);
  }
  return el("div", {}, drop.takers.map((taker) => {
    const run = taker.run;
    return el(
      "p",
      { class: "facts" },
      state(taker.state || run?.status || ""),
      inside(taskPage(v, taker.dag_run), run?.run || taker.dag_run),
      run?.version ? el("span", {}, `version ${run.version}`) : "",
      run?.loss !== null && run?.loss !== undefined ? el("span", {}, `evaluation loss ${number(run.loss)}`) : "",
      run?.verdict ? el("span", { class: "quiet" }, run.verdict) : "",
    );
  }));
}

function drops(v) {
  const rows = v.drops.map((drop) => [
    el("span", { title: drop.id }, drop.name || drop.id),
    moment(drop.entered),
    drop.files ? `${number(drop.files)} ${drop.files === 1 ? "file" : "files"}, ${bytes(drop.bytes)}` : "–",
    became(v, drop),
  ]);
  return card(
    "Drops and what happened to them",
    "drops",
    rows.length ? table(["drop", "entered", "size", "became"], rows, "drops") : el("p", { class: "quiet" }, "No drop is in the ledger."),
    v.more_drops ? el("p", { class: "quiet" }, v.whole ? `and ${number(v.more_drops)} older ones` : `and more than ${number(v.more_drops)} others: too many to find the newest`) : "",
  );
}

function refused(v) {
  return card("Refused drops", "refused", table(["drop", "since", "why"], v.refused.map((item) => [item.name, moment(item.since), el("span", { class: "bad" }, item.why)])));
}

function runs(v) {
  const rows = v.runs.map((run) => [
    el("span", {}, run.dag_run ? inside(taskPage(v, run.dag_run), run.run || run.dag_run) : run.run, " ", link(run.url, "MLflow ↗")),
    state(run.status),
    moment(run.began),
    run.loss,
    run.version,
    run.verdict,
  ]);
  return card("Runs", "runs", table(["run", "status", "began", "evaluation loss", "version", "verdict"], rows));
}

function show(v) {
  sections(page, [
    ["head", [v.family, v.versions, v.url], () => head(v)],
    ["choose", [v.families, v.family], () => choose(v)],
    v.unseen.length ? ["unseen", v.unseen, () => el("div", { id: "unseen" }, v.unseen.map((u) => el("p", { class: "warn", role: "status" }, `Not shown: ${u.what}: ${u.why}.`)))] : null,
    v.family ? null : ["none", 0, () => el("p", { class: "quiet" }, "There is no family yet: drop data into S3, or start a run from the form.")],
    v.family ? ["versions", v.versions, () => versions(v)] : null,
    v.refused.length ? ["refused", v.refused, () => refused(v)] : null,
    v.family ? ["drops", [v.drops, v.more_drops], () => drops(v)] : null,
    v.runs.length ? ["runs", v.runs, () => runs(v)] : null,
  ]);
}

followTheme();
poll(() => `family.json${location.search}`, show, { quick: 6000 });
