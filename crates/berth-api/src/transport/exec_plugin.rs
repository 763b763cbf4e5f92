//! Exec credential plugin: `client.authentication.k8s.io/v1` and `v1beta1` (spec 01 §10.1).
//!
//! Runs on demand, single-flight; its credentials are cached until they expire or the server rejects them.

use std::{process::Stdio, sync::Arc, time::Duration};

use http::HeaderValue;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{io::AsyncReadExt, process::Command, sync::Mutex, time::timeout};

use super::{
    credentials::bearer,
    identity::{CertifiedPair, ClientIdentity},
    kubeconfig::Exec,
};
use berth_metrics::{ExecCall, TransportMetrics};
use berth_ports::Clock;

/// Timeout of one run.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes read of its output at most.
const LIMIT: u64 = 1 << 20;

/// Exec plugin and its cached credentials.
pub struct ExecPlugin {
    exec: Exec,
    /// Cluster information passed to the plugin; `None` unless it is requested.
    cluster: Option<Value>,
    /// Receives the client certificate that the plugin provides.
    identity: ClientIdentity,
    clock: Arc<dyn Clock>,
    metrics: TransportMetrics,
    cached: Mutex<Option<ExecCredentials>>,
    doubted: std::sync::atomic::AtomicBool,
}

struct ExecCredentials {
    header: Option<HeaderValue>,
    until: Option<Timestamp>,
    /// When the plugin last provided a different certificate.
    shown: Option<Timestamp>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    kind: String,
    api_version: String,
    status: Option<Status>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Status {
    expiration_timestamp: Option<Timestamp>,
    token: String,
    client_certificate_data: String,
    client_key_data: String,
}

impl ExecPlugin {
    /// Returns a plugin that has not run yet.
    pub fn new(
        exec: Exec,
        cluster: Option<Value>,
        identity: ClientIdentity,
        (clock, metrics): (Arc<dyn Clock>, TransportMetrics),
    ) -> Self {
        let cluster = cluster.filter(|_| exec.provide_cluster_info);
        Self { exec, cluster, identity, clock, metrics, cached: Mutex::default(), doubted: false.into() }
    }

    /// Header for the next request; `None` if the plugin provides a certificate only. A certificate is stored in the
    /// identity before this returns.
    ///
    /// # Errors
    /// The plugin cannot be run, or provides no usable credentials.
    pub async fn header(&self) -> Result<Option<HeaderValue>, String> {
        let mut cached = self.cached.lock().await;
        let doubted = self.doubted.swap(false, std::sync::atomic::Ordering::Relaxed);
        let now = self.clock.now();
        if let Some(cached) = cached.as_ref().filter(|cached| !doubted && cached.until.is_none_or(|until| now < until))
        {
            return Ok(cached.header.clone());
        }
        let shown = cached.as_ref().and_then(|cached| cached.shown);
        let fresh = self.ask(shown).await.map_err(|cause| format!("getting credentials: {cause}"))?;
        let header = fresh.header.clone();
        *cached = Some(fresh);
        Ok(header)
    }

    /// Invalidates the cached credentials after the server rejected them.
    pub fn forget(&self) {
        self.doubted.store(true, std::sync::atomic::Ordering::Relaxed);
    }

    /// Runs the plugin; `shown` is when the previous certificate was provided.
    async fn ask(&self, mut shown: Option<Timestamp>) -> Result<ExecCredentials, String> {
        let text = self.run().await?;
        let answer: Answer =
            serde_json::from_slice(&text).map_err(|e| format!("decoding stdout of {}: {e}", self.exec.command))?;
        if answer.api_version != self.exec.api_version || answer.kind != "ExecCredential" {
            return Err(format!(
                "exec plugin is configured to use API version {}, plugin returned version {}",
                self.exec.api_version, answer.api_version
            ));
        }
        let status = answer.status.ok_or("exec plugin didn't return a status field")?;
        match (status.client_certificate_data.is_empty(), status.client_key_data.is_empty()) {
            (false, false) => {
                let (certificate, key) = (&status.client_certificate_data, &status.client_key_data);
                let pair = CertifiedPair::from_pem(certificate.as_bytes(), key.as_bytes());
                let pair = pair.map_err(|e| format!("failed parsing client key/certificate: {e}"))?;
                let until = pair.expires();
                if self.identity.set(Some(pair)) {
                    let now = self.clock.now();
                    let last = shown.replace(now).map(|before| now.as_second().saturating_sub(before.as_second()));
                    self.metrics.exec_certificate(until, last);
                }
            }
            (true, true) if status.token.is_empty() => {
                return Err("exec plugin didn't return a token or cert/key pair".to_owned());
            }
            (true, true) => {}
            _ => return Err("exec plugin returned only certificate or key, not both".to_owned()),
        }
        let header = (!status.token.is_empty()).then(|| bearer(&status.token)).transpose()?;
        Ok(ExecCredentials { header, until: status.expiration_timestamp, shown })
    }

    async fn run(&self) -> Result<Vec<u8>, String> {
        let (outcome, result) = match self.run_once().await {
            Ok(text) => (ExecCall::Good, Ok(text)),
            Err((outcome, cause)) => (outcome, Err(cause)),
        };
        self.metrics.ran_exec(outcome);
        result
    }

    async fn run_once(&self) -> Result<Vec<u8>, (ExecCall, String)> {
        let broken = |cause: String| (ExecCall::Broken, cause);
        let Exec { command, args, env, api_version, .. } = &self.exec;
        let mut spec = json!({"interactive": false});
        if let Some(cluster) = &self.cluster {
            spec["cluster"] = cluster.clone();
        }
        let info = json!({"kind": "ExecCredential", "apiVersion": api_version, "spec": spec});
        let mut child = Command::new(command)
            .args(args.iter().flatten())
            .envs(env.iter().flatten().map(|variable| (&variable.name, &variable.value)))
            .env("KUBERNETES_EXEC_INFO", info.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| self.failed(&e))?;
        let output = child.stdout.take().ok_or_else(|| broken("exec: stdout is not available".to_owned()))?;
        let reading = async {
            let mut text = Vec::new();
            output.take(LIMIT).read_to_end(&mut text).await?;
            Ok::<_, std::io::Error>((text, child.wait().await?))
        };
        let late = |_| broken(format!("exec: {command} timed out after {PATIENCE:?}"));
        let read = timeout(PATIENCE, reading).await.map_err(late)?;
        let (text, status) = read.map_err(|e| broken(format!("exec: {e}")))?;
        if status.success() {
            return Ok(text);
        }
        let code = status.code().unwrap_or(-1);
        Err((ExecCall::Failed(code), format!("exec: executable {command} failed with exit code {code}")))
    }

    fn failed(&self, error: &std::io::Error) -> (ExecCall, String) {
        let Exec { command, install_hint, .. } = &self.exec;
        let hint = install_hint.as_deref().map(|hint| format!("\n\n{hint}")).unwrap_or_default();
        match error.kind() {
            std::io::ErrorKind::NotFound => (ExecCall::NotFound, format!("exec: executable {command} not found{hint}")),
            _ => (ExecCall::Broken, format!("exec: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::kubeconfig::ExecVariable;
    use berth_metrics::Registry;

    struct At(std::sync::Mutex<Timestamp>);

    impl Clock for At {
        fn now(&self) -> Timestamp {
            *self.0.lock().expect("whole")
        }
    }

    fn plugin(script: &str, clock: Arc<At>) -> ExecPlugin {
        counted(script, clock, &Registry::new())
    }

    fn counted(script: &str, clock: Arc<At>, registry: &Registry) -> ExecPlugin {
        let exec = Exec {
            command: "sh".into(),
            args: Some(vec!["-c".into(), script.into()]),
            env: Some(vec![ExecVariable { name: "WORD".into(), value: "word".into() }]),
            api_version: "client.authentication.k8s.io/v1".into(),
            provide_cluster_info: true,
            interactive_mode: Some("Never".into()),
            install_hint: Some("install it".into()),
        };
        ExecPlugin::new(
            exec,
            Some(json!({"server": "s"})),
            ClientIdentity::anonymous(),
            (clock, TransportMetrics::new(registry)),
        )
    }

    fn credential_script(status: &str) -> String {
        format!(
            r#"printf '{{"kind":"ExecCredential","apiVersion":"client.authentication.k8s.io/v1","status":{status}}}'"#
        )
    }

    fn clock() -> Arc<At> {
        Arc::new(At(std::sync::Mutex::new("2026-01-01T00:00:00Z".parse().expect("a time"))))
    }

    #[tokio::test]
    async fn its_word_is_good_for_a_while() {
        let folder = tempfile::tempdir().expect("a folder");
        let runs = folder.path().join("runs");
        let status = r#"{"token":"'"$WORD$(wc -l < RUNS)"'","expirationTimestamp":"2026-01-01T01:00:00Z"}"#;
        let script = format!("echo \"$KUBERNETES_EXEC_INFO\" >> RUNS; {}", credential_script(status));
        let clock = clock();
        let plugin = plugin(&script.replace("RUNS", &runs.display().to_string()), clock.clone());
        let token =
            || async { plugin.header().await.map(|header| header.expect("one").to_str().expect("text").to_owned()) };
        assert_eq!(token().await, Ok("Bearer word1".to_owned()));
        assert_eq!(token().await, Ok("Bearer word1".to_owned()));
        *clock.0.lock().expect("whole") = "2026-01-01T01:00:00Z".parse().expect("a time");
        assert_eq!(token().await, Ok("Bearer word2".to_owned()), "it has expired");
        plugin.forget();
        assert_eq!(token().await, Ok("Bearer word3".to_owned()));
        let exec_infos = std::fs::read_to_string(&runs).expect("it was run");
        let exec_info: Value = serde_json::from_str(exec_infos.lines().next().expect("a line")).expect("JSON");
        assert_eq!(exec_info["spec"], json!({"interactive": false, "cluster": {"server": "s"}}));
    }

    #[tokio::test]
    async fn plugin_failures_are_errors_with_their_cause() {
        for (script, expected) in [
            ("exit 3".to_owned(), "getting credentials: exec: executable sh failed with exit code 3"),
            ("echo nonsense".to_owned(), "getting credentials: decoding stdout of sh: "),
            (credential_script("{}"), "getting credentials: exec plugin didn't return a token or cert/key pair"),
            (credential_script("null"), "getting credentials: exec plugin didn't return a status field"),
            (
                credential_script(r#"{"clientKeyData":"x"}"#),
                "getting credentials: exec plugin returned only certificate or key",
            ),
            (
                r#"echo '{"kind":"ExecCredential","apiVersion":"v7"}'"#.to_owned(),
                "getting credentials: exec plugin is configured to use API version client.authentication.k8s.io/v1, \
                 plugin returned version v7",
            ),
        ] {
            let error = plugin(&script, clock()).header().await.expect_err(expected);
            assert!(error.starts_with(expected), "{script}: {error}");
        }
        let mut missing = plugin("", clock());
        missing.exec.command = "/nonexistent/plugin".into();
        let error = missing.header().await.expect_err("missing");
        assert_eq!(error, "getting credentials: exec: executable /nonexistent/plugin not found\n\ninstall it");
    }
    #[tokio::test]
    async fn its_certificates_are_counted() {
        let folder = tempfile::tempdir().expect("a folder");
        let (answer, clock, registry) = (folder.path().join("answer"), clock(), Registry::new());
        let plugin = counted(&format!("cat {}", answer.display()), clock.clone(), &registry);
        let write_credential = || {
            let made = rcgen::generate_simple_self_signed(["n".to_owned()]).expect("a pair");
            let status =
                json!({"clientCertificateData": made.cert.pem(), "clientKeyData": made.signing_key.serialize_pem()});
            let credential =
                json!({"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1", "status": status});
            std::fs::write(&answer, credential.to_string()).expect("written");
        };
        write_credential();
        for _ in 0..2 {
            assert_eq!(plugin.header().await, Ok(None));
            plugin.forget(); // the plugin provides the same certificate again: that is no change
        }
        assert_eq!(plugin.header().await, Ok(None));
        *clock.0.lock().expect("whole") = "2026-01-01T00:15:00Z".parse().expect("a time");
        write_credential();
        plugin.forget();
        assert_eq!(plugin.header().await, Ok(None));
        std::fs::remove_file(&answer).expect("removed");
        plugin.forget();
        plugin.header().await.expect_err("it fails");
        let families = registry.gather();
        let of =
            |name: &str| families.iter().find(|family| family.name() == name).expect("counted").get_metric().to_vec();
        let calls = of("rest_client_exec_plugin_call_total");
        let counts: Vec<f64> = calls.iter().map(|metric| metric.get_counter().get_value()).collect();
        assert_eq!(counts, [4.0, 1.0], "{calls:?}");
        let age = of("rest_client_exec_plugin_certificate_rotation_age");
        let age = age[0].get_histogram();
        assert_eq!((age.get_sample_count(), age.get_sample_sum()), (1, 900.0));
        assert!(of("rest_client_exec_plugin_ttl_seconds")[0].get_gauge().get_value() > 3600.0);
    }
}
