//! Fixture for kubectl on a real runtime behind a minimal API server facade, and the test of `kubectl logs`.
//!
//! The requests on the wire equal those of a real API server to a kubelet that supports WebSockets.

use std::{
    process::{Output, Stdio},
    sync::Arc,
    time::Duration,
};

use berth::certificates::{Authority, CertificatePairPaths, Validity};
use jiff::Timestamp;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use serde_json::json;
use tokio::{io::AsyncWriteExt, process::Command, time::timeout};

use crate::node::{Node, UNTIL_STOPPED, shell};
use berth_testkit::{
    kube_front::{KubeFront, Kubelet},
    process::manifest_of,
    reservation,
};

/// Timeout of a kubectl call.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A node with its main port open, and a proxy for kubectl.
pub struct Cluster {
    /// The node.
    pub node: Node,
    front: KubeFront,
}

/// Starts the cluster; `None`, with a report, if the test is skipped.
pub async fn cluster(test: &str) -> Option<Cluster> {
    if std::process::Command::new("kubectl").arg("version").arg("--client").output().is_err() {
        println!("skipped: {test}: kubectl is not installed");
        return None;
    }
    let folder = tempfile::tempdir().expect("a folder").keep();
    let valid = Validity::days(Timestamp::now(), 2);
    let authority = Authority::create("test", valid).expect("an authority");
    let serving = authority.serving("localhost", &["127.0.0.1".to_owned()], valid).expect("a certificate");
    let admin = authority.client("admin", &["system:masters"], valid).expect("a certificate");
    let (server, client) = (CertificatePairPaths::of(&folder, "server"), CertificatePairPaths::of(&folder, "admin"));
    server.write(&serving).expect("written");
    client.write(&admin).expect("written");
    let ca = folder.join("ca.crt");
    std::fs::write(&ca, &authority.own().certificate).expect("written");
    let [port] = reservation::free_ports();
    let fields = json!({
        "enableServer": true,
        "port": port,
        // The highest verbosity at which requests are logged.
        "logging": {"verbosity": 6},
        "tlsCertFile": server.certificate,
        "tlsPrivateKeyFile": server.key,
        "authentication": {
            "anonymous": {"enabled": false}, "webhook": {"enabled": false}, "x509": {"clientCAFile": ca},
        },
    });
    let node = Node::with(test, fields).await?;
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&ca).expect("a certificate")).expect("good");
    let chain =
        CertificateDer::pem_file_iter(&client.certificate).expect("a file").collect::<Result<_, _>>().expect("PEM");
    let key = PrivateKeyDer::from_pem_file(&client.key).expect("a key");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .expect("a pair");
    let kubelet = Kubelet { address: ([127, 0, 0, 1], port).into(), tls: Arc::new(tls) };
    let front = KubeFront::start(kubelet).await.expect("a port");
    Some(Cluster { node, front })
}

impl Cluster {
    /// A kubectl command.
    pub fn kubectl(&self, args: &[&str]) -> Command {
        let mut command = Command::new("kubectl");
        command.args(["--server", &self.front.url, "--namespace", "default"]).args(args);
        command.env("KUBECONFIG", "/dev/null").env("HOME", self.node.home.path()).kill_on_drop(true);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    async fn run(&self, args: &[&str]) -> Output {
        ended(self.kubectl(args), None).await
    }
}

/// Runs a command to its end, with that stdin.
pub async fn ended(mut command: Command, input: Option<&[u8]>) -> Output {
    if input.is_some() {
        command.stdin(Stdio::piped());
    }
    let mut child = command.spawn().expect("it starts");
    if let (Some(bytes), Some(mut stdin)) = (input, child.stdin.take()) {
        let bytes = bytes.to_owned();
        tokio::spawn(async move {
            let _ = stdin.write_all(&bytes).await; // a command may not read all its input
        });
    }
    timeout(PATIENCE, child.wait_with_output()).await.expect("it ends").expect("it ran")
}

/// Exit code, stdout, and stderr.
pub fn code_and_output(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubectl_reads_logs() {
    let Some(cluster) = cluster("kubectl_reads_logs").await else { return };
    let script = format!(
        "echo one; echo two; mkdir -p /www; echo served > /www/index.html; httpd -p 8080 -h /www; {UNTIL_STOPPED}"
    );
    let spec = json!({"terminationGracePeriodSeconds": 1, "containers": [shell("main", &script)]});
    let pod = cluster.node.run(&manifest_of("front", spec)).await;
    let name = pod["metadata"]["name"].as_str().expect("a name").to_owned();
    let name = name.as_str();

    let (code, out, err) = code_and_output(&cluster.run(&["logs", name]).await);
    assert_eq!((code, out.as_str()), (Some(0), "one\ntwo\n"), "{err}");
    let (code, out, err) = code_and_output(&cluster.run(&["logs", name, "--tail=1", "--timestamps"]).await);
    assert!(code == Some(0) && out.ends_with("Z two\n") && out.lines().count() == 1, "{out}{err}");

    let (code, _, err) = code_and_output(&cluster.run(&["logs", "nobody"]).await);
    assert!(code == Some(1) && err.contains("not found"), "{code:?} {err}");
    cluster.node.remove(&pod).await;
}
