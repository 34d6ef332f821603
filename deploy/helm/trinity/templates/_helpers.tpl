{{/* Names of the components in the order of their ports; the role of each is its name. */}}
{{- define "trinity.ports" -}}
buffer: {grpc: 7001, metrics: 9001}
environment: {grpc: 7002, metrics: 9002}
explorer: {grpc: 7003, metrics: 9003}
sync: {grpc: 7004, metrics: 9004}
trainer: {grpc: 7005, metrics: 9005}
{{- end }}

{{- define "trinity.selector" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "trinity.labels" -}}
{{ include "trinity.selector" . }}
app.kubernetes.io/part-of: trinity
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "trinity.image" -}}
{{ .root.Values.image.registry }}{{ .image }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* Text as a NATS token: trinity.runtime.names.slug. */}}
{{- define "trinity.slug" -}}
{{ regexReplaceAll "[^A-Za-z0-9_]+" . "_" | trimAll "_" | trunc 40 | default "x" }}
{{- end }}

{{/* Id of the run: trinity.runtime.names.run_id of the YAML's project, group and name. */}}
{{- define "trinity.runId" -}}
{{- if .Values.runId -}}
{{ .Values.runId }}
{{- else -}}
{{- $config := fromYaml .Values.config }}
{{- if hasKey $config "Error" }}{{ fail (printf "config: is no YAML: %s" $config.Error) }}{{ end }}
{{- range list "project" "group" "name" }}
{{- if and (hasKey $config .) (not (kindIs "string" (get $config .))) }}{{ fail (printf "config: %s is no text to helm; put it in quotes" .) }}{{ end }}
{{- end }}
{{- $project := $config.project | default "Trinity-RFT" }}
{{- $group := $config.group | default "" }}
{{- $name := $config.name | default "rft" }}
{{- if $config.stages }}
{{- $name = printf "%s/%s" $name (required "stage: is empty, and the YAML has several; name one" .Values.stage) }}
{{- end }}
{{- if contains "${" (print $project $group $name) }}
{{- fail "runId: is empty, and project, group or name of the YAML are interpolated; give the id of the run" }}
{{- end }}
{{- $digest := printf "%s\x00%s\x00%s" $project $group $name | sha256sum | trunc 6 }}
{{- include "trinity.slug" $project }}{{ with $group }}-{{ include "trinity.slug" . }}{{ end }}-{{ include "trinity.slug" $name }}-{{ $digest }}
{{- end -}}
{{- end }}

{{/* Settings of a service as environment variables; those of the values come last and win. */}}
{{- define "trinity.env" -}}
{{- $prefix := printf "TRINITY_%s_" (upper .name) }}
{{- $ports := get (include "trinity.ports" . | fromYaml) .name }}
{{- $env := dict "LISTEN" (printf "0.0.0.0:%v" $ports.grpc) "METRICS_LISTEN" (printf "0.0.0.0:%v" $ports.metrics) }}
{{- $_ := set $env "TLS_CERT" "/identity/tls.crt" }}
{{- $_ := set $env "TLS_KEY" "/identity/tls.key" }}
{{- $_ := set $env "TLS_CA" "/identity/ca.crt" }}
{{- $_ := set $env "NATS_URL" "nats://nats:4222" }}
{{- $_ := set $env "NATS_CREDS" "/identity/nats.creds" }}
{{- $_ := set $env "NATS_CA" "/identity/ca.crt" }}
{{- if has .name (list "buffer" "explorer" "trainer") }}
{{- $_ := set $env "CONFIG_FILE" "/etc/trinity/run.yaml" }}
{{- with .root.Values.stage }}{{ $_ := set $env "STAGE" . }}{{ end }}
{{- end }}
{{- range $key, $value := .settings }}{{ $_ := set $env $key $value }}{{ end }}
{{- $all := dict "HOME" "/tmp" "USER" "trinity" }}
{{- range $key, $value := $env }}{{ $_ := set $all (print $prefix $key) $value }}{{ end }}
{{- range $key, $value := .values.env }}{{ $_ := set $all $key $value }}{{ end }}
{{- range $key, $value := $all }}
- name: {{ $key }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}

{{/* What every pod has: it has no rights in the cluster, and Services add no variables to it. */}}
{{- define "trinity.podSettings" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .root.Values.security.user }}
  runAsGroup: {{ .root.Values.security.group }}
  fsGroup: {{ .root.Values.security.group }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "trinity.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* The files of an identity, readable for the pod's group. */}}
{{- define "trinity.identityVolume" -}}
- name: identity
  projected:
    defaultMode: 0440
    sources:
      - secret: {name: trinity-{{ .name }}}
{{- if eq .root.Values.identity.form "cert-manager" }}
      - secret: {name: trinity-{{ .name }}-nats}
{{- end }}
{{- end }}

{{/* The pod of a service: spec without restartPolicy. */}}
{{- define "trinity.servicePod" -}}
{{- $ports := get (include "trinity.ports" . | fromYaml) .name -}}
{{- $hasData := ne .name "sync" -}}
{{ include "trinity.podSettings" . }}
terminationGracePeriodSeconds: {{ add 30 (get .settings "DRAIN_SECONDS" | default 5) }}
containers:
  - name: {{ .name }}
    image: {{ include "trinity.image" (dict "root" .root "image" .values.image) }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: [trinity-{{ .name }}, serve]
    env: {{- include "trinity.env" . | indent 6 }}
{{- with .values.envFrom }}
    envFrom: {{- toYaml . | nindent 6 }}
{{- end }}
    ports:
      - {name: grpc, containerPort: {{ $ports.grpc }}}
      - {name: metrics, containerPort: {{ $ports.metrics }}}
    # Healthy means SERVING. The probe shows the pod's own certificate.
    startupProbe:
      exec: {command: [trinity-{{ .name }}, health]}
      periodSeconds: 10
      timeoutSeconds: 10
      failureThreshold: {{ div (.startSeconds | default 600) 10 }}
    readinessProbe:
      exec: {command: [trinity-{{ .name }}, health]}
      periodSeconds: 15
      timeoutSeconds: 10
{{- if ne .name "trainer" }}
    livenessProbe:
      exec: {command: [trinity-{{ .name }}, health]}
      periodSeconds: 30
      timeoutSeconds: 20
      failureThreshold: 6
{{- end }}
    resources:
{{- $resources := deepCopy .values.resources }}
{{- if .values.gpus }}
{{- $_ := set $resources "limits" (merge (dict .values.gpuResource .values.gpus) ($resources.limits | default dict)) }}
{{- end }}
{{- toYaml $resources | nindent 6 }}
{{ include "trinity.containerSecurity" . | indent 4 }}
    volumeMounts:
      - {name: identity, mountPath: /identity, readOnly: true}
      - {name: tmp, mountPath: /tmp}
{{- if has .name (list "buffer" "explorer" "trainer") }}
      - {name: config, mountPath: /etc/trinity, readOnly: true}
{{- end }}
{{- if $hasData }}
      - name: data
        mountPath: {{ .root.Values.data.mountPath }}
        readOnly: {{ has .name (list "environment" "explorer") }}
{{- end }}
{{- if .values.sharedMemory }}
      - {name: shared-memory, mountPath: /dev/shm}
{{- end }}
{{- if .values.cache }}
      - {name: cache, mountPath: /cache}
{{- end }}
volumes:
{{ include "trinity.identityVolume" . | indent 2 }}
  - {name: tmp, emptyDir: {}}
{{- if has .name (list "buffer" "explorer" "trainer") }}
  - {name: config, configMap: {name: run}}
{{- end }}
{{- if $hasData }}
  - {name: data, persistentVolumeClaim: {claimName: {{ .root.Values.data.existingClaim | default "data" }}}}
{{- end }}
{{- with .values.sharedMemory }}
  - {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: {{ . }}}}
{{- end }}
{{- with .values.cache }}
{{- if .storageClass }}
  - name: cache
    ephemeral:
      volumeClaimTemplate:
        spec:
          accessModes: [ReadWriteOnce]
          storageClassName: {{ .storageClass }}
          resources: {requests: {storage: {{ .size }}}}
{{- else }}
  - {name: cache, emptyDir: {sizeLimit: {{ .size }}}}
{{- end }}
{{- end }}
{{- end }}

{{/* The Service by which a component is called. */}}
{{- define "trinity.service" -}}
{{- $ports := get (include "trinity.ports" . | fromYaml) .name -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "trinity.labels" . | nindent 4 }}
spec:
  selector: {{- include "trinity.selector" . | nindent 4 }}
{{- if eq .name "explorer" }}
  clusterIP: None
{{- end }}
{{- if and (eq .name "trainer") (gt (int .root.Values.trainer.nodes) 1) }}
  # Further machines join before the trainer is ready, and reach its ranks at any port.
  clusterIP: None
  publishNotReadyAddresses: true
{{- end }}
  ports:
    - {name: grpc, port: {{ $ports.grpc }}, targetPort: grpc}
    - {name: metrics, port: {{ $ports.metrics }}, targetPort: metrics}
{{- end }}
