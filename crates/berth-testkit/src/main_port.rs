//! Main port of a test agent: own certificate authority, client certificates, and curl.

use std::{path::PathBuf, time::Duration};

use berth::certificates::{Authority, CertificatePairPaths, Validity};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::process::Command;

use super::{process::Answer, reservation::free_ports};

/// Main port of an agent, with the authority that both sides trust.
pub struct MainPort {
    /// Port number.
    pub port: u16,
    /// Signs the serving certificate, and is trusted for clients.
    pub authority: Authority,
    folder: tempfile::TempDir,
}

impl MainPort {
    /// Reserves a free port and creates its files.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("failed to create temporary directory");
        let authority = Authority::create("test", Self::valid()).expect("failed to create the CA");
        let port = Self { port: free_ports::<1>()[0], authority, folder };
        port.serve(&port.authority);
        std::fs::write(port.path("ca.crt"), &port.authority.own().certificate).expect("written");
        std::fs::write(port.path("clients.crt"), &port.authority.own().certificate).expect("written");
        port
    }

    /// Validity of test certificates.
    pub fn valid() -> Validity {
        Validity::days(Timestamp::now(), 30)
    }

    /// Path of a file beside the certificates: clients trust `ca.crt`; the agent trusts clients of `clients.crt`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Replaces the serving certificate by one of that authority.
    pub fn serve(&self, by: &Authority) {
        let names = ["127.0.0.1", "localhost"].map(str::to_owned);
        let issued = by.serving("node", &names, Self::valid()).expect("failed to issue certificate");
        CertificatePairPaths::of(self.folder.path(), "serving").write(&issued).expect("written");
    }

    /// Issues a client certificate of the test's authority.
    pub fn client(&self, name: &str, groups: &[&str]) -> CertificatePairPaths {
        let files = CertificatePairPaths::of(self.folder.path(), name);
        files
            .write(&self.authority.client(name, groups, Self::valid()).expect("failed to issue certificate"))
            .expect("written");
        files
    }

    /// Configuration fields that open the port to every client with a certificate.
    pub fn fields(&self) -> Value {
        let serving = CertificatePairPaths::of(self.folder.path(), "serving");
        json!({
            "enableServer": true,
            "port": self.port,
            "tlsCertFile": serving.certificate,
            "tlsPrivateKeyFile": serving.key,
            "authentication": {
                "anonymous": {"enabled": false},
                "webhook": {"enabled": false},
                "x509": {"clientCAFile": self.path("clients.crt")},
            },
            "authorization": {"mode": "AlwaysAllow"},
        })
    }

    /// Configuration fields that delegate decisions to an API server, which `--kubeconfig` selects.
    pub fn webhook_fields(&self) -> Value {
        let mut fields = self.fields();
        fields["authentication"]["webhook"]["enabled"] = true.into();
        fields["authorization"]["mode"] = "Webhook".into();
        fields
    }

    /// Requests a path with curl and more arguments. If there is no response, the status is 0 and the body is curl's
    /// error message.
    pub async fn curl(&self, path: &str, more: &[&str]) -> Answer {
        let url = format!("https://127.0.0.1:{}{path}", self.port);
        let ca = self.path("ca.crt").display().to_string();
        let mut command = Command::new("curl");
        command.args(["-sSi", "--path-as-is", "--max-time", "60", "--cacert", &ca]).args(more).arg(url);
        command.kill_on_drop(true);
        let ended =
            tokio::time::timeout(Duration::from_secs(90), command.output()).await.expect("timed out waiting for curl");
        let output = ended.expect("failed to run curl");
        let answer = String::from_utf8_lossy(&output.stdout).into_owned();
        match answer.split_once("\r\n\r\n") {
            Some((head, body)) if output.status.success() => {
                let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_default();
                Answer { status, head: head.to_lowercase(), body: body.to_owned() }
            }
            _ => Answer { body: String::from_utf8_lossy(&output.stderr).into_owned(), ..Answer::default() },
        }
    }

    /// Like [`Self::curl`], with a bearer token.
    pub async fn curl_as(&self, token: &str, path: &str) -> Answer {
        self.curl(path, &["-H", &format!("Authorization: Bearer {token}")]).await
    }

    /// Like [`Self::curl`], with a client certificate.
    pub async fn curl_with(&self, client: &CertificatePairPaths, path: &str) -> Answer {
        let (certificate, key) = (client.certificate.display().to_string(), client.key.display().to_string());
        self.curl(path, &["--cert", &certificate, "--key", &key]).await
    }

    /// Waits until the port responds.
    pub async fn open(&self) {
        let answers = async {
            while self.curl("/nothing", &[]).await.status != 404 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(super::process::PATIENCE, answers).await.expect("timed out waiting for the main port");
    }
}
