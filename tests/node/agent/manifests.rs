//! Static pod directory of a real agent: an invalid file affects only its own pod.

use serde_json::{Value, json};

use crate::agent::ScriptedServer;
use berth_testkit::process::{Agent, container, manifest, skips};

/// Fields that must not change while a pod is left alone.
fn identity(pod: &Value) -> Value {
    let main = container(pod, "main");
    json!([pod["metadata"]["uid"], main["containerID"], main["restartCount"], pod["status"]["phase"]])
}

async fn assert_untouched(agent: &Agent, name: &str, before: &Value) {
    let now = agent.until_ready(name).await;
    assert_eq!(identity(&now), identity(before), "{name} has changed");
}

/// Invalid files beside each other and beside a valid one: each is reported once, none affects the others, and each
/// runs as soon as it is fixed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_files_cost_only_their_own_pods() {
    if skips("bad_files_cost_only_their_own_pods") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home().with(json!({"fileCheckFrequency": "1s"}));
    home.put_pod(&manifest("good"));
    let agent = home.start().await;
    let before = agent.until_ready("good").await;

    let list = json!({"apiVersion": "v1", "kind": "List", "items": [manifest("a"), manifest("b")]});
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}});
    let mut nameless = manifest("nameless");
    nameless["spec"]["containers"] = json!([]);
    let mut huge = manifest("huge").to_string().into_bytes();
    huge.resize(11 << 20, b' ');
    let rows: &[(&str, Vec<u8>, &str)] = &[
        ("broken.yaml", b"metadata: [".to_vec(), "couldn't parse as pod(error converting YAML to JSON"),
        ("list.yaml", list.to_string().into_bytes(), "couldn't parse as pod("),
        ("service.yaml", service.to_string().into_bytes(), "couldn't parse as pod("),
        ("empty.yaml", Vec::new(), "couldn't parse as pod("),
        ("no-containers.yaml", nameless.to_string().into_bytes(), "spec.containers: Required value"),
        ("huge.yaml", huge, "file exceeds the size limit"),
        ("binary.yaml", vec![0, 255, 1, 254], "couldn't parse as pod("),
    ];
    for (file, content, _) in rows {
        home.put(file, content);
    }
    std::os::unix::fs::symlink("loop.yaml", home.manifests().join("loop.yaml")).expect("a link");
    std::os::unix::fs::symlink("/proc/self/mem", home.manifests().join("unreadable.yaml")).expect("a link");
    std::fs::create_dir(home.manifests().join("folder")).expect("a folder");
    for (file, _, text) in rows {
        let line = agent.until_log(&format!("{file}\"")).await;
        assert!(line.contains(text) && line.contains("Could not process manifest file"), "{line}");
    }
    let line = agent.until_log("loop.yaml").await;
    assert!(line.contains("Too many levels of symbolic links"), "{line}");
    let line = agent.until_log("unreadable.yaml").await;
    assert!(line.contains("Input/output error"), "{line}"); // an error even for root
    let line = agent.until_log("pods/folder").await;
    assert!(line.contains("not recursing into directory"), "{line}");
    assert_untouched(&agent, "good", &before).await;

    // Each file is fixed, and its pod runs; the other pods are unchanged.
    for link in ["loop.yaml", "unreadable.yaml"] {
        std::fs::remove_file(home.manifests().join(link)).expect("removed");
    }
    for file in ["broken.yaml", "list.yaml", "huge.yaml", "loop.yaml", "unreadable.yaml"] {
        let name = format!("mended-{}", file.trim_end_matches(".yaml"));
        home.put(file, manifest(&name).to_string());
        agent.until_ready(&name).await;
    }
    assert_untouched(&agent, "good", &before).await;
    assert_eq!(agent.pods().await.len(), 6);
    // Reported once each, however often the directory was listed.
    let reports = agent.log().matches("service.yaml\"").count();
    assert_eq!(reports, 1, "{}", agent.log_end());
    assert!(runtime.cri.violations().is_empty());
}

/// Two files with a pod of one name: the first by file name runs, the other is reported, and takes over when the first
/// is removed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_pods_with_one_name_one_runs() {
    if skips("of_two_pods_with_one_name_one_runs") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home();
    let mut second = manifest("twin");
    second["metadata"]["labels"] = json!({"file": "second"});
    home.put("1.json", manifest("twin").to_string());
    home.put("2.json", second.to_string());
    home.put_pod(&manifest("other"));
    let agent = home.start().await;
    agent.until_ready("twin").await;
    let other = agent.until_ready("other").await;
    let line = agent.until_log("Ignoring pod with duplicate name").await;
    assert!(line.contains("twin-test-node"), "{line}");
    assert_eq!(agent.pods().await.len(), 2);
    assert_eq!(runtime.cri.running("twin-test-node", "main").len(), 1);
    home.remove("1.json");
    agent.until_pod("twin", "the second", |pod| pod["metadata"]["labels"]["file"] == "second").await;
    agent.until_ready("twin").await;
    assert_untouched(&agent, "other", &other).await;
    assert_eq!(runtime.cri.history().overlaps(), Vec::<String>::new());
}

/// Removing the directory removes its pods; they return with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_directory_goes_and_returns() {
    if skips("the_directory_goes_and_returns") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home().with(json!({"fileCheckFrequency": "1s"}));
    for name in ["one", "two"] {
        home.put_pod(&manifest(name));
    }
    let agent = home.start().await;
    agent.until_ready("one").await;
    agent.until_ready("two").await;
    let aside = home.path().join("aside");
    std::fs::rename(home.manifests(), &aside).expect("renamed");
    agent.until_log("Path does not exist, ignoring").await;
    agent.until_gone("one").await;
    agent.until_gone("two").await;
    runtime.until("all is gone", &agent, |cri| cri.sandboxes().is_empty()).await;
    std::fs::rename(&aside, home.manifests()).expect("renamed");
    agent.until_ready("one").await;
    agent.until_ready("two").await;
    home.put_pod(&manifest("three"));
    agent.until_ready("three").await;
}

/// A missing directory does not fail the start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_directory_comes_late() {
    if skips("the_directory_comes_late") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home().with(json!({"fileCheckFrequency": "1s"}));
    std::fs::remove_dir(home.manifests()).expect("removed");
    let agent = home.start().await;
    agent.until_log("Path does not exist, ignoring").await;
    std::fs::create_dir(home.manifests()).expect("a folder");
    home.put_pod(&manifest("one"));
    agent.until_ready("one").await;
}

/// A changed manifest replaces its pod; a removed one deletes it; the others stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_manifest_replaces_its_pod() {
    if skips("a_changed_manifest_replaces_its_pod") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home();
    home.put_pod(&manifest("stays"));
    home.put_pod(&manifest("changes"));
    let agent = home.start().await;
    let stays = agent.until_ready("stays").await;
    let before = agent.until_ready("changes").await;
    let mut changed = manifest("changes");
    changed["spec"]["containers"][0]["env"] = json!([{"name": "NEW", "value": "1"}]);
    home.put_pod(&changed);
    let uid = before["metadata"]["uid"].clone();
    let after = agent.until_pod("changes", "replaced", |pod| pod["metadata"]["uid"] != uid).await;
    assert_eq!(after["spec"]["containers"][0]["env"][0]["name"], "NEW");
    agent.until_ready("changes").await;
    assert_eq!(runtime.cri.history().overlaps(), Vec::<String>::new());
    home.remove("changes.json");
    agent.until_gone("changes").await;
    runtime.until("only one sandbox is left", &agent, |cri| cri.sandboxes().len() == 1).await;
    assert_untouched(&agent, "stays", &stays).await;
}
