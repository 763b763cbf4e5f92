//! API description against a running agent, by schemathesis (of PyPI), on both ports.
//!
//! It requests everything that is described, and much that is not. A test reports its name and is skipped where
//! schemathesis cannot be installed.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::json;
use tokio::process::Command;

use crate::agent::ScriptedServer;
use berth_testkit::{
    main_port::MainPort,
    process::{manifest, manifest_of, skips},
    scripted_cri::Behaviour,
};

/// Environment variable with the examples per operation (`make test-long`: 20).
const EXAMPLES: &str = "BERTH_SCHEMATHESIS_EXAMPLES";
/// Default examples per operation: about 10 s in all.
const FEW: &str = "1";
/// Time limits in seconds for the open paths, and for all paths.
const LIMITS: (u32, u32) = (15, 45);
/// Timeout of the installation.
const INSTALLING: Duration = Duration::from_secs(300);
/// Exit code of `api/fuzz.sh` if it cannot install.
const CANNOT_INSTALL: i32 = 3;

fn fuzz(arguments: &[&str]) -> Command {
    let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/api/fuzz.sh"));
    let place = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("schemathesis");
    command.args(arguments).env("SCHEMATHESIS", place).env("NO_COLOR", "1").kill_on_drop(true);
    command
}

/// Whether schemathesis is installed now; installs it if needed.
async fn is_installed() -> bool {
    let Ok(installing) = tokio::time::timeout(INSTALLING, fuzz(&["install"]).output()).await else { return false };
    let output = installing.expect("a shell");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() || output.status.code() == Some(CANNOT_INSTALL), "{stderr}");
    output.status.success()
}

/// Runs schemathesis for that many seconds; fails if a response does not match the description.
async fn ask(arguments: &[&str], limit: u32, operations: usize) {
    let examples = std::env::var(EXAMPLES).unwrap_or_else(|_| FEW.to_owned());
    let limits = [("LIMIT", limit.to_string()), ("EXAMPLES", examples)];
    let output = fuzz(arguments).envs(limits).output().await.expect("a shell");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    assert!(printed.contains(&format!("Tested: {operations}\n")), "not all is asked:\n{printed}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_answer_is_described() {
    if skips("every_answer_is_described") {
        return;
    }
    if !is_installed().await {
        return println!("skipped: every_answer_is_described: schemathesis cannot be installed");
    }
    let runtime = ScriptedServer::new().await;
    runtime.cri.behave("once", [Behaviour::exits(0, Duration::from_millis(100))]);
    let main = MainPort::new();
    let home = runtime.home().with(main.fields()).with(json!({"enableSystemLogQuery": true}));
    home.put_pod(&manifest("web"));
    home.put_pod(&manifest_of("done", json!({"restartPolicy": "Never", "containers": [{"name": "once"}]})));
    let agent = home.start().await;
    let web = agent.until_ready("web").await;
    let done = agent.until_pod("done", "done", |pod| pod["status"]["phase"] == "Succeeded").await;
    // The scripted runtime runs no processes, so the logs are written here.
    for (pod, container) in [(web, "main"), (done, "once")] {
        let of = |field: &str| pod["metadata"][field].as_str().expect("text").to_owned();
        let folder = home.logs().join(format!("default_{}_{}/{container}", of("name"), of("uid")));
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::write(folder.join("0.log"), "2026-01-02T03:04:05.000000006Z stdout F a line\n").expect("written");
    }

    let open = format!("http://127.0.0.1:{}", home.read_only_port());
    ask(&[&open, "--include-tag", "open"], LIMITS.0, 11).await;
    let files = main.client("admin", &["system:masters"]);
    let shown = |path: &Path| path.display().to_string();
    let (admin, key, ca) = (shown(&files.certificate), shown(&files.key), shown(&main.path("ca.crt")));
    let identity = ["--request-cert", &admin, "--request-cert-key", &key, "--tls-verify", &ca];
    let url = format!("https://127.0.0.1:{}", main.port);
    ask(&[&[url.as_str()][..], &identity].concat(), LIMITS.1, 39).await;
    assert_eq!(agent.stop().await, Some(0));
}
