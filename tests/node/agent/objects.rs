//! ConfigMap and Secret manifests beside the static pods of a standalone node.

use std::{fs, path::PathBuf};

use serde_json::json;

use berth_testkit::{
    process::{manifest_of, skips},
    scripted_server::ScriptedServer,
};

const OBJECTS: &str = "apiVersion: v1
kind: ConfigMap
metadata: {name: settings, namespace: default}
data: {colour: blue}
---
apiVersion: v1
kind: Secret
metadata: {name: key, namespace: default}
stringData: {word: swordfish}
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn manifests_beside_the_pods_satisfy_references() {
    if skips("manifests_beside_the_pods_satisfy_references") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home();
    let objects = home.path().join("objects");
    fs::create_dir(&objects).expect("a folder");
    let home = home.settings(json!({"standaloneObjects": {"directory": objects}}));
    let spec = json!({
        "containers": [{"name": "main",
            "env": [{"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "key", "key": "word"}}}],
            "volumeMounts": [{"name": "files", "mountPath": "/etc/settings"}]}],
        "volumes": [{"name": "files", "configMap": {"name": "settings", "defaultMode": 0o644}}]});
    let mut pod = manifest_of("reader", spec);
    pod["metadata"]["namespace"] = json!("default");
    home.put_pod(&pod);
    let agent = home.start().await;
    agent.until_log("MountVolume.SetUp failed").await;
    let write = |text: &str| {
        let draft = home.path().join("draft");
        fs::write(&draft, text).expect("written");
        fs::rename(draft, objects.join("all.yaml")).expect("renamed");
    };
    write(OBJECTS);
    runtime.until("it runs", &agent, |cri| !cri.running("reader-test-node", "main").is_empty()).await;
    let environment = runtime.cri.environment("reader-test-node", "main");
    assert!(environment.contains(&("WORD".to_owned(), "swordfish".to_owned())), "{environment:?}");
    let file = || -> Option<PathBuf> {
        let pods = fs::read_dir(home.root().join("pods")).ok()?;
        let files = pods.flatten().map(|pod| pod.path().join("volumes/kubernetes.io~configmap/files/colour"));
        files.into_iter().find(|path| path.exists())
    };
    let file = file().expect("mounted");
    assert_eq!(fs::read_to_string(&file).expect("readable"), "blue");
    write(&OBJECTS.replace("blue", "green"));
    agent.until("the file follows", async || fs::read_to_string(&file).is_ok_and(|text| text == "green")).await;
    assert_eq!(runtime.cri.count("start_container"), 1, "nothing is restarted");
    drop(agent);
}
