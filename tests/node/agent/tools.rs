//! Administration endpoints of a running agent: checkpoints, statusz, flagz, configz, and profiles.
//!
//! Over its main port with an administrator's certificate.

use std::{
    path::PathBuf,
    time::{Duration, SystemTime},
};

use berth::certificates::CertificatePairPaths;
use serde_json::{Value, json};

use crate::agent::ScriptedServer;
use berth_testkit::{
    main_port::MainPort,
    process::{Answer, NODE, manifest_of, skips},
    scripted_cri::Fault,
};

/// A client with an administrator's certificate.
struct Admin {
    port: MainPort,
    client: CertificatePairPaths,
}

impl Admin {
    fn new() -> Self {
        let port = MainPort::new();
        let client = port.client("admin", &["system:masters"]);
        Self { port, client }
    }

    async fn ask(&self, path: &str, more: &[&str]) -> Answer {
        let (certificate, key) = (self.client.certificate.display().to_string(), self.client.key.display().to_string());
        self.port.curl(path, &[&["--cert", &certificate, "--key", &key], more].concat()).await
    }

    async fn post(&self, path: &str) -> Answer {
        self.ask(path, &["-X", "POST"]).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn checkpoints_are_few_and_do_not_stay_for_ever() {
    if skips("checkpoints_are_few_and_do_not_stay_for_ever") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let admin = Admin::new();
    let home = runtime.home().with(admin.port.fields());
    home.put_pod(&manifest_of("web", json!({"containers": [{"name": "a"}, {"name": "b"}, {"name": "c"}]})));
    let agent = home.start().await;
    agent.until_ready("web").await;
    admin.port.open().await;
    let path = |container: &str| format!("/checkpoint/default/web-{NODE}/{container}");
    let folder = home.root().join("checkpoints");

    let Answer { status, head, body } = admin.post(&path("a")).await;
    let answer: Value = serde_json::from_str(&body).expect("JSON");
    let archive = PathBuf::from(answer["items"][0].as_str().expect("a path"));
    assert_eq!((status, archive.parent()), (200, Some(folder.as_path())), "{head}");
    let name = archive.file_name().expect("a name").to_string_lossy().into_owned();
    assert!(name.starts_with(&format!("checkpoint-web-{NODE}_default-a-")) && name.ends_with(".tar"), "{name}");
    assert!(archive.is_file());
    let mode = std::os::unix::fs::PermissionsExt::mode(&folder.metadata().expect("made").permissions());
    assert_eq!(mode & 0o777, 0o700);

    // More than a week old: the next checkpoint deletes it.
    let old = std::fs::File::options().write(true).open(&archive).expect("there");
    old.set_modified(SystemTime::now() - Duration::from_secs(8 * 24 * 3600)).expect("ours");
    runtime.cri.fault("checkpoint_container", "", Fault::Delay(Duration::from_secs(4)), Some(2));
    let calls = || runtime.cri.calls().iter().filter(|call| call.op == "checkpoint_container").count();
    let third = async {
        agent.until("two are being written", async || calls() == 3).await;
        for container in ["b", "a"] {
            let Answer { status, head, body } = admin.post(&path(container)).await;
            let text =
                format!("checkpointing of default/web-{NODE}/{container} failed (too many checkpoints in progress)");
            assert_eq!((status, body), (429, text));
            assert!(head.contains("\r\nretry-after: "), "{head}");
        }
    };
    let (b, c) = (path("b"), path("c"));
    let (first, second, ()) = tokio::join!(admin.post(&b), admin.post(&c), third);
    assert_eq!((first.status, second.status), (200, 200), "{first:?} {second:?}");
    assert!(!archive.exists(), "it is too old");
    let written = || std::fs::read_dir(&folder).expect("there").count();
    assert_eq!(written(), 2);

    // The runtime continues for a disconnected client: the next request must wait nevertheless.
    runtime.cri.fault("checkpoint_container", "", Fault::Delay(Duration::from_secs(4)), Some(1));
    assert_eq!(admin.ask(&path("a"), &["-X", "POST", "--max-time", "1"]).await.status, 0, "it goes");
    assert_eq!(admin.post(&path("a")).await.status, 429);
    agent.until("it is written", async || written() == 3).await;

    let refused = "CheckpointContainer is not supported".to_owned();
    runtime.cri.fault("checkpoint_container", "", Fault::Error(tonic::Code::Unimplemented, refused), None);
    let Answer { status, body, .. } = admin.post(&path("c")).await;
    assert_eq!(status, 500);
    assert!(body.starts_with(&format!("checkpointing of default/web-{NODE}/c failed (")), "{body}");
    assert!(body.contains("CheckpointContainer is not supported"), "{body}");
    for (path, status) in [("/checkpoint/default/nobody/a", 404), ("/checkpoint/default/a", 404)] {
        assert_eq!(admin.post(path).await.status, status, "{path}");
    }
    assert_eq!(admin.ask(&path("a"), &[]).await.status, 405);
    let open = agent.get(&path("a")).await.expect("an answer");
    assert_eq!(open.status, 404, "never on a port without a door");
    assert_eq!(agent.stop().await, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn people_and_machines_read_the_same_pages() {
    if skips("people_and_machines_read_the_same_pages") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let admin = Admin::new();
    let agent = runtime.home().with(admin.port.fields()).flag("--v=1").start().await;
    admin.port.open().await;
    for (page, kind) in [("flagz", "Flagz"), ("statusz", "Statusz")] {
        let Answer { status, head, body } = admin.ask(&format!("/{page}"), &[]).await;
        let beginning =
            format!("\nkubelet {page}\nWarning: This endpoint is not meant to be machine parseable, has no ");
        assert!(status == 200 && body.starts_with(&beginning), "{body}");
        assert!(head.contains("content-type: text/plain; charset=utf-8"), "{head}");
        let accept = |version: &str| format!("Accept: application/json;as={kind};v={version};g=config.k8s.io");
        let Answer { status, head, body } = admin.ask(&format!("/{page}"), &["-H", &accept("v1beta1")]).await;
        let object: Value = serde_json::from_str(&body).expect("JSON");
        assert_eq!((status, &object["kind"], head.contains("\r\nwarning:")), (200, &json!(kind), false));
        let Answer { head, .. } = admin.ask(&format!("/{page}"), &["-H", &accept("v1alpha1")]).await;
        // Response heads are in lower case here.
        let warning = format!(
            "warning: 299 - \"this version of the {page} endpoint is deprecated. please use a newer version.\""
        );
        assert!(head.contains(&warning), "{head}");
        let media = format!("content-type: application/json;g=config.k8s.io;v=v1alpha1;as={page}\r\n");
        assert!(head.contains(&media), "{head}");
        // AC-01-27
        let Answer { status, body, .. } = admin.ask(&format!("/{page}"), &["-H", "Accept: application/json"]).await;
        assert!(status == 406 && body.contains("\"reason\":\"NotAcceptable\""), "{body}");
        let listed = "only the following media types are accepted: application/json, application/yaml, text/plain";
        assert!(body.contains(listed), "{body}");
    }
    // The effective configuration: flags override the file.
    let Answer { head, body, .. } = admin.ask("/configz", &["--http1.1"]).await;
    let shown: Value = serde_json::from_str(&body).expect("JSON");
    let config = &shown["kubeletconfig"];
    assert_eq!((&config["kind"], &config["maxPods"]), (&json!("KubeletConfiguration"), &json!(250)));
    assert_eq!((&config["syncFrequency"], &config["logging"]["verbosity"]), (&json!("1m0s"), &json!(1)));
    assert!(head.contains("x-content-type-options: nosniff") && !body.ends_with('\n'), "{head}");

    assert!(!agent.log().contains("\"HTTP\""), "too quiet for that");
    let Answer { status, body, .. } = admin.ask("/debug/flags/v", &["-X", "PUT", "-d", "3"]).await;
    assert_eq!((status, body.as_str()), (200, "successfully set klog.logging.verbosity to 3\n"));
    admin.ask("/healthz?x=y", &[]).await;
    agent.until_log("\"HTTP\"").await;

    // Twice: the first request starts the sampling.
    for _ in 0..2 {
        let Answer { status, head, .. } = admin.ask("/debug/pprof/heap", &["-o", "/dev/null", "-D", "-"]).await;
        assert!(status == 200 && head.contains("filename=\"heap\""), "{head}");
    }
    let Answer { body: threads, .. } = admin.ask("/debug/pprof/goroutine?debug=1", &[]).await;
    assert!(threads.starts_with("threads: ") && threads.contains(" running\n"), "{threads}");
    assert_eq!(agent.stop().await, Some(0));
}
