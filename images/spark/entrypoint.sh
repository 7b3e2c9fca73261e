#!/bin/sh
# What Spark on Kubernetes asks of an image: `driver ARGUMENTS` and `executor`, with the rest in the environment, as in
# https://github.com/apache/spark/blob/v4.0.0/resource-managers/kubernetes/docker/src/main/dockerfiles/spark/entrypoint.sh
set -eu
case "$1" in
driver)
  shift
  exec "$SPARK_HOME/bin/spark-submit" --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" \
    --conf "spark.executorEnv.SPARK_DRIVER_POD_IP=$SPARK_DRIVER_BIND_ADDRESS" --deploy-mode client "$@"
  ;;
executor)
  # Java's options come one to a variable, SPARK_JAVA_OPT_0 and so on, and may hold blanks.
  set --
  count=0
  while eval "option=\${SPARK_JAVA_OPT_$count:-}" && [ -n "$option" ]; do
    set -- "$@" "$option"
    count=$((count + 1))
  done
  exec "${JAVA_HOME:?}/bin/java" "$@" "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
    -cp "$SPARK_HOME/jars/*" org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
    --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
    --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
    --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
  ;;
*)
  echo "give driver or executor, not $1" >&2
  exit 2
  ;;
esac
