//! OCI hooks of CDI devices in the container lifecycle. Spec 09a §8.4.

use std::{
    fs,
    time::{Duration, Instant},
};

use berth_proto::cri;
use serde_json::json;

use berth_testkit::embedded::{
    fixture::in_network_namespace,
    in_process::{container, daemon, pod},
};

#[test]
fn hooks_of_devices_are_executed_and_can_refuse() {
    in_network_namespace("hooks_of_devices_are_executed_and_can_refuse", async |place| {
        let log = place.path().join("log");
        let hook = |moment: &str, script: String| json!({"hookName": moment, "path": "/bin/sh", "args": ["sh", "-c", script], "env": ["PATH=/usr/bin:/bin"]});
        let note = |moment: &str| hook(moment, format!("{{ printf '{moment} '; cat; echo; }} >> {}", log.display()));
        // As vendors' hooks do: finds the root by the bundle and writes a file into it.
        let put = r#"bundle=$(sed 's/.*"bundle":"\([^"]*\)".*/\1/')
            root=$(sed 's/.*"root":{"path":"\([^"]*\)".*/\1/' $bundle/config.json)
            echo "of a hook" > $root/library"#;
        let hooks =
            [note("createRuntime"), hook("createContainer", put.to_owned()), note("poststart"), note("poststop")];
        let spec = json!({"cdiVersion": "0.6.0", "kind": "acme.com/gpu", "devices": [
            {"name": "good", "containerEdits": {"hooks": hooks}},
            {"name": "bad", "containerEdits": {"hooks": [
                hook("createContainer", "echo no such card; exit 4".to_owned()), note("poststop"),
            ]}},
        ]});
        fs::create_dir_all(place.path().join("cdi")).expect("makeable");
        fs::write(place.path().join("cdi/acme.json"), spec.to_string()).expect("writable");
        let daemon = daemon(place.path()).await;
        let sandbox = daemon.run(pod(place.path(), "h")).await;
        let with = |name: &str, device: &str| cri::ContainerConfig {
            cdi_devices: vec![cri::CdiDevice { name: format!("acme.com/gpu={device}") }],
            ..container(name, "while :; do sleep 0.1; done")
        };
        let log_until = async |wanted: &str| {
            let begun = Instant::now();
            loop {
                let text = fs::read_to_string(&log).unwrap_or_default();
                if text.lines().any(|line| line.starts_with(wanted)) {
                    return text;
                }
                assert!(begun.elapsed() < Duration::from_secs(20), "no {wanted} in {text:?}");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let good = daemon.start(&sandbox, with("good", "good")).await;
        assert_eq!(daemon.exec(&good, "cat /library").await, ("of a hook\n".to_owned(), 0));
        let text = log_until("poststart ").await;
        assert_eq!(text.lines().count(), 2, "{text}");
        for line in text.lines() {
            let (_, state) = line.split_once(' ').expect("a name");
            let state: serde_json::Value = serde_json::from_str(state).expect("JSON");
            assert_eq!((&state["id"], &state["ociVersion"]), (&good.as_str().into(), &"1.2.0".into()));
            assert_eq!(state["annotations"]["io.kubernetes.cri.sandbox-id"], sandbox);
        }
        daemon.calls.stop_container(&good, 0).await.expect("stops");
        log_until("poststop ").await;
        fs::remove_file(&log).expect("there");

        let bad = daemon.calls.create(&sandbox, &with("bad", "bad")).await.expect("made");
        let request = cri::StartContainerRequest { container_id: bad.clone() };
        let refused = daemon.calls.rpc.clone().start_container(request).await.expect_err("refused");
        let text = "createContainer hook /bin/sh failed: exit status 4: no such card";
        assert!(refused.message().contains(text), "{refused:?}");
        assert_eq!(daemon.status(&bad).await.reason, "StartError");
        log_until("poststop ").await;
        daemon.remove(&sandbox).await;
        place.assert_clean();
        daemon.stop.cancel();
    });
}
