#!/bin/sh
# GPU tests of a staged image as a Job of Kubernetes, for `test.gpu_command` of matrix.yaml: see gpu-tests.yaml.
#
# Edit: the namespace, the resources, and imagePullSecrets for a private registry.
#
# The output of the pod has the results. The Job ends after an hour, also if no node has a GPU for it.
set -eu
namespace=gpu-tests
image=$1
shift
arguments=$(printf ', "%s"' "$@")  # no word has a quotation mark or a backslash
job=$(kubectl --namespace "$namespace" create --output=name --filename=- <<JOB
apiVersion: batch/v1
kind: Job
metadata:
  generateName: gpu-tests-
spec:
  backoffLimit: 0
  activeDeadlineSeconds: 3600
  ttlSecondsAfterFinished: 3600
  template:
    spec:
      restartPolicy: Never
      automountServiceAccountToken: false
      enableServiceLinks: false
      securityContext:
        runAsNonRoot: true
        runAsUser: 1000
        runAsGroup: 0
        seccompProfile:
          type: RuntimeDefault
      tolerations:
        - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
      containers:
        - name: tests
          image: $image
          args: [${arguments#, }]
          resources:
            limits:
              nvidia.com/gpu: "1"
              cpu: "4"
              memory: 32Gi
          securityContext:
            allowPrivilegeEscalation: false
            capabilities:
              drop: [ALL]
          volumeMounts:
            - {name: shm, mountPath: /dev/shm}
      volumes:
        - name: shm
          emptyDir:
            medium: Memory
            sizeLimit: 1Gi
JOB
)
trap 'kubectl --namespace "$namespace" delete --wait=false "$job" >&2' EXIT
trap 'exit 143' INT TERM
ended() {
  kubectl --namespace "$namespace" get "$job" --output="jsonpath={.status.conditions[?(@.status=='True')].type}"
}
while state=$(ended) && test -z "$state"; do sleep 5; done
kubectl --namespace "$namespace" logs "$job"
case $state in
  *Complete* | *SuccessCriteriaMet*) ;;
  *) echo "$job: $state" >&2; exit 1 ;;
esac
