//! An agent's main port as callers see it: certificates of an authority of the test's own, and curl.

use std::{path::PathBuf, time::Duration};

use berth::wiring::certificates::{Authority, PairFiles, Validity};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::process::Command;

use super::{process::Answer, reservation::free_ports};

/// Where it is, and who is believed there.
pub struct MainPort {
    /// The port.
    pub port: u16,
    /// Signs the serving certificate, and is believed for clients.
    pub authority: Authority,
    folder: tempfile::TempDir,
}

impl MainPort {
    /// A port that is free, with its files.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let authority = Authority::create("test", Self::valid()).expect("an authority");
        let port = Self { port: free_ports::<1>()[0], authority, folder };
        port.serve(&port.authority);
        std::fs::write(port.path("ca.crt"), &port.authority.own().certificate).expect("written");
        std::fs::write(port.path("clients.crt"), &port.authority.own().certificate).expect("written");
        port
    }

    /// When certificates of tests hold.
    pub fn valid() -> Validity {
        Validity::days(Timestamp::now(), 30)
    }

    /// A file beside the certificates: `ca.crt` is what clients believe, `clients.crt` whose clients are believed.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Puts a serving certificate of that authority in place.
    pub fn serve(&self, by: &Authority) {
        let names = ["127.0.0.1", "localhost"].map(str::to_owned);
        let issued = by.serving("node", &names, Self::valid()).expect("a certificate");
        PairFiles::of(self.folder.path(), "serving").write(&issued).expect("written");
    }

    /// A client's certificate of our authority.
    pub fn client(&self, name: &str, groups: &[&str]) -> PairFiles {
        let files = PairFiles::of(self.folder.path(), name);
        files.write(&self.authority.client(name, groups, Self::valid()).expect("a certificate")).expect("written");
        files
    }

    /// Fields of the configuration that open it to whoever has a certificate.
    pub fn fields(&self) -> Value {
        let serving = PairFiles::of(self.folder.path(), "serving");
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

    /// Fields of the configuration with which an API server decides; `--kubeconfig` says which.
    pub fn webhook_fields(&self) -> Value {
        let mut fields = self.fields();
        fields["authentication"]["webhook"]["enabled"] = true.into();
        fields["authorization"]["mode"] = "Webhook".into();
        fields
    }

    /// What curl is told about a path, with more arguments; status 0 where there is no answer, and
    /// then the body is what curl says about it.
    pub async fn curl(&self, path: &str, more: &[&str]) -> Answer {
        let url = format!("https://127.0.0.1:{}{path}", self.port);
        let ca = self.path("ca.crt").display().to_string();
        let mut command = Command::new("curl");
        command.args(["-sSi", "--path-as-is", "--max-time", "60", "--cacert", &ca]).args(more).arg(url);
        command.kill_on_drop(true);
        let ended = tokio::time::timeout(Duration::from_secs(90), command.output()).await.expect("curl ends");
        let output = ended.expect("curl is installed");
        let answer = String::from_utf8_lossy(&output.stdout).into_owned();
        match answer.split_once("\r\n\r\n") {
            Some((head, body)) if output.status.success() => {
                let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_default();
                Answer { status, head: head.to_lowercase(), body: body.to_owned() }
            }
            _ => Answer { body: String::from_utf8_lossy(&output.stderr).into_owned(), ..Answer::default() },
        }
    }

    /// The same with a bearer token.
    pub async fn curl_as(&self, token: &str, path: &str) -> Answer {
        self.curl(path, &["-H", &format!("Authorization: Bearer {token}")]).await
    }

    /// The same with a client's certificate.
    pub async fn curl_with(&self, client: &PairFiles, path: &str) -> Answer {
        let (certificate, key) = (client.certificate.display().to_string(), client.key.display().to_string());
        self.curl(path, &["--cert", &certificate, "--key", &key]).await
    }

    /// Waits until it answers at all.
    pub async fn open(&self) {
        let answers = async {
            while self.curl("/nothing", &[]).await.status != 404 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(super::process::PATIENCE, answers).await.expect("the main port opens");
    }
}
