// What Airflow's UI loads for each of our tabs: a frame with the page of what the user looks at.
// It fits any path prefix, because all addresses are relative to Airflow's own base.
const DAG = "dropforge_finetune";

function address({ dagId, runId, taskId, mapIndex }) {
  if (runId === undefined) {
    return `dropforge/dags/${DAG}/families`;
  }
  const query = new URLSearchParams({ run_id: runId });
  if (taskId !== undefined) query.set("task_id", taskId);
  if (mapIndex !== undefined) query.set("map_index", mapIndex);
  return `dropforge/dags/${encodeURIComponent(dagId)}/task?${query}`;
}

globalThis.AirflowPlugin = (props) => {
  const { createElement } = globalThis.React;
  if (props.dagId !== undefined && props.dagId !== DAG) {
    return createElement("p", { style: { padding: "1rem" } }, "Dropforge shows the runs of dropforge_finetune here.");
  }
  return createElement("iframe", {
    src: new URL(address(props), document.baseURI).href,
    title: "Dropforge",
    style: { border: "none", display: "block", height: "100%", minHeight: "70vh", width: "100%" },
  });
};
