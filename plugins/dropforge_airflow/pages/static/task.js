// The tab on a task and on a run.
import { bytes, card, curve, el, followTheme, inside, lasted, link, moment, number, poll, sections, state, table } from "./draw.js";

const TITLES = { "train/loss": "training loss", "eval/loss": "evaluation loss", "train/tokens_per_second": "tokens per second" };
const page = document.getElementById("page");
let replica = "";

function head(v) {
  const t = v.training;
  return el(
    "header",
    {},
    el("h1", {}, v.run || v.dag_run),
    state(v.state),
    el("span", { class: "quiet" }, v.family ? el("span", {}, "family ", familyLink(v.family)) : v.live ? "no run was opened yet" : "no run was opened"),
    t?.version ? el("span", {}, `version ${t.version}`) : "",
    t ? link(t.url, "MLflow run ↗") : "",
  );
}

function familyLink(family) {
  return el("a", { href: `families?family=${encodeURIComponent(family)}` }, family);
}

function stages(v) {
  const run = `dags/${encodeURIComponent(v.dag)}/runs/${encodeURIComponent(v.dag_run)}/tasks/`;
  return el(
    "ol",
    { class: "stages" },
    v.stages.map((s) =>
      el(
        "li",
        { "data-state": s.state || "none", "data-here": s.name === v.task },
        inside(run + encodeURIComponent(s.name), s.name),
        el("small", {}, s.state || "–", s.began ? " · " : "", lasted(s.began, s.ended), s.tries > 1 ? ` · try ${s.tries}` : ""),
      ),
    ),
  );
}

function job(v) {
  const j = v.job;
  if (j === null) return card("Job", "job", el("p", { class: "quiet" }, v.has_job ? "This task has no job yet." : "This task has no job."));
  const title = `Job ${j.name}`;
  if (j.gone) {
    const told = j.phase ? `It ended as ${j.phase}${j.message ? `: ${j.message}` : ""}.` : "Nothing is known of its end.";
    return card(title, "job", el("p", {}, "The job cannot be seen (any more). ", told));
  }
  const p = j.progress;
  const pods = `${j.pods_running} of ${j.pods_wanted} pods run`;
  return card(
    title,
    "job",
    el(
      "p",
      { class: "facts" },
      state(j.phase),
      el("span", {}, pods),
      j.gang > 1 ? el("span", {}, `attempt ${j.gang}`) : "",
      el("span", {}, lasted(j.began, j.ended)),
    ),
    j.queue ? el("p", { class: "warn" }, j.position ? `At position ${j.position} of queue ${j.queue}` : `In queue ${j.queue}`) : "",
    j.message && j.message !== pods ? el("p", { class: j.reason ? "bad" : "" }, j.reason ? `${j.reason}: ` : "", j.message) : "",
    j.mend ? el("p", { class: "quiet" }, j.mend) : "",
    p?.steps ? bar(p.step, p.steps) : "",
    j.replicas.length
      ? table(
          ["replica", "node", "state", "exit", "time", ""],
          j.replicas.map((r) => [
            r.replica,
            r.node ?? "–",
            state(r.phase),
            r.exit_code ?? "–",
            lasted(r.began, r.ended),
            [r.failed_first ? "failed first" : "", r.restarts ? `${r.restarts} restarts` : "", r.message].filter(Boolean).join(", "),
          ]),
          "replicas",
        )
      : el("p", { class: "quiet" }, "It has no pods."),
    j.more_replicas ? el("p", { class: "quiet" }, `and ${j.more_replicas} more`) : "",
  );
}

function bar(step, steps) {
  return el("p", { class: "progress" }, el("progress", { value: step, max: steps }), el("span", {}, `step ${number(step)} of ${number(steps)}`));
}

function training(v) {
  const t = v.training;
  return card(
    "Training",
    "training",
    el(
      "p",
      { class: "facts" },
      t.step !== null ? el("span", {}, t.steps ? `step ${number(t.step)} of ${number(t.steps)}` : `step ${number(t.step)}`) : "",
      t.resumed_from ? el("span", { class: "warn" }, `resumed from step ${t.resumed_from}`) : "",
      t.attempt ? el("span", {}, `attempt ${t.attempt}`) : "",
      t.mfu !== null && t.mfu !== undefined ? el("span", {}, `MFU ${number(t.mfu)}`) : "",
    ),
    el("div", { class: "curves" }, t.curves.map((c) => curve(TITLES[c.name] ?? c.name, c.points, `curve-${c.name.replace(/\W/g, "-")}`))),
  );
}

function timeline(v) {
  const rows = v.job.moments.map((m) => [moment(m.at), el("span", { class: m.holds ? "" : "quiet" }, m.holds ? m.what : `${m.what} (no more)`), m.message]);
  return card("What happened to the job", "timeline", table(["when", "what", ""], rows));
}

function tries(v) {
  const rows = v.tries.map((t) => [t.number, state(t.state), moment(t.began), lasted(t.began, t.ended), t.why]);
  const ran = v.attempts.map((a) => [
    a.attempt,
    a.resumed_from === null || a.resumed_from === undefined ? "from its start" : `from step ${a.resumed_from}`,
    a.ranks,
    a.host ?? "",
    moment(a.at),
  ]);
  return card(
    `Tries of ${v.task}`,
    "tries",
    rows.length ? table(["try", "state", "began", "time", "why again"], rows) : el("p", { class: "quiet" }, "none yet"),
    ran.length ? el("h3", {}, "Attempts of the training") : "",
    ran.length ? table(["attempt", "resumed", "ranks", "host of rank 0", "began"], ran) : "",
  );
}

function checkpoints(v) {
  const c = v.checkpoints;
  const from = c.start ? `the ${c.start}` : "the base model";
  const told = c.done
    ? "The training is done; nothing is left to resume."
    : c.resumes === null
      ? `There is no complete checkpoint: a new attempt would begin at ${from}.`
      : `A new attempt would resume from step ${c.resumes}.`;
  return card(
    "Checkpoints",
    "checkpoints",
    el("p", {}, told),
    c.elsewhere ? el("p", { class: "quiet" }, "They are kept in a place of the recipe's; these are the ones MLflow knows.") : "",
    c.rows.length
      ? table(
          ["step", "size", "evaluation loss", ""],
          c.rows.map((r) => [r.step, bytes(r.bytes), r.eval_loss, [r.best ? "best" : "", r.complete ? "" : "not complete", r.aside ? "set aside" : ""].filter(Boolean).join(", ")]),
        )
      : "",
  );
}

function champion(v) {
  const c = v.champion;
  const rival = c.version ? `version ${c.version}, the champion` : "nothing: the family had no champion";
  const change = (f) => {
    if (typeof f.candidate !== "number" || typeof f.champion !== "number") return "";
    const by = f.candidate - f.champion;
    const good = by === 0 || !f.better ? "" : (f.better === "lower") === by < 0 ? "good" : "bad";
    const share = f.champion ? ` (${by > 0 ? "+" : ""}${((100 * by) / Math.abs(f.champion)).toFixed(2)} %)` : "";
    return el("span", { class: good }, `${by > 0 ? "+" : ""}${number(by)}${share}`);
  };
  return card(
    "Candidate against champion",
    "champion",
    el("p", { class: "facts" }, el("span", {}, `Against ${rival}`), c.rows ? el("span", {}, `on ${number(c.rows)} rows`) : "", c.compare ? link(c.compare, "compare in MLflow ↗") : ""),
    c.decided ? el("p", { class: c.promote ? "good" : "warn" }, c.promote ? "Promote: " : "Keep the champion: ", c.reason) : el("p", { class: "quiet" }, "Not judged yet."),
    c.problem ? el("p", { class: "warn" }, `The champion has no figures: ${c.problem}`) : "",
    c.note ? el("p", { class: "warn" }, c.note) : "",
    table(["figure", "candidate", "champion", "change"], c.figures.map((f) => [f.name, f.candidate, f.champion, change(f)])),
    c.checks.length
      ? table(["check", "candidate", "against", "", "why"], c.checks.map((k) => [k.name, k.candidate, k.reference, el("span", { class: k.passed ? "good" : "bad" }, k.passed ? "passed" : "not passed"), k.reason]))
      : "",
  );
}

function log(v) {
  if (v.log === null) return card("Last lines", "log", el("p", { class: "quiet" }, "You may not read the logs of this DAG."));
  const places = v.job?.replicas?.map((r) => r.replica) ?? [];
  const choice = el("select", { "aria-label": "replica" }, el("option", { value: "" }, "all"), places.map((name) => el("option", { value: name, selected: name === replica }, name)));
  choice.addEventListener("change", () => {
    replica = choice.value;
    again();
  });
  const source = { pods: "as the pods print them", kept: "as they are kept in the run's folder; up to a minute old" }[v.log.source] ?? "";
  return card(
    "Last lines of each rank",
    "log",
    el("p", { class: "facts" }, places.length > 1 ? choice : "", el("span", { class: "quiet" }, source)),
    v.log.ranks.length === 0 ? el("p", { class: "quiet" }, "There are no lines.") : "",
    v.log.ranks.map((r) =>
      el("details", { open: v.log.ranks.length <= 4 || r.rank === (v.job?.failing_rank ?? 0) }, el("summary", {}, r.rank === null ? `launcher of ${r.pod}` : `rank ${r.rank}`, el("small", {}, r.rank === null ? "" : r.pod)), el("pre", {}, r.lines.join("\n"))),
    ),
  );
}

function show(v) {
  const unseen = [...v.unseen, ...(v.log?.unseen ? [v.log.unseen] : [])];
  sections(page, [
    ["head", [v.run, v.dag_run, v.state, v.family, v.training?.version, v.training?.url], () => head(v)],
    unseen.length ? ["unseen", unseen, () => el("div", { id: "unseen" }, unseen.map((u) => el("p", { class: "warn", role: "status" }, `Not shown: ${u.what}: ${u.why}.`)))] : null,
    ["stages", v.stages, () => stages(v)],
    v.failures.length ? ["failures", v.failures, () => el("div", { id: "failures" }, v.failures.map((f) => el("p", { class: "bad" }, `${f.stage} failed: ${f.text}`)))] : null,
    v.has_job ? ["job", v.job, () => job(v)] : null,
    v.training ? ["training", v.training, () => training(v)] : null,
    v.champion ? ["champion", v.champion, () => champion(v)] : null,
    v.has_job ? ["log", [v.log, v.job?.replicas?.length, replica], () => log(v)] : null,
    v.checkpoints ? ["checkpoints", v.checkpoints, () => checkpoints(v)] : null,
    ["tries", [v.tries, v.attempts], () => tries(v)],
    v.job?.moments?.length ? ["timeline", v.job.moments, () => timeline(v)] : null,
  ]);
}

followTheme();
const again = poll(() => {
  const query = new URLSearchParams(location.search);
  if (replica) query.set("replica", replica);
  return `task.json?${query}`;
}, show);
