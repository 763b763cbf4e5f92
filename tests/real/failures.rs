//! Failing pods on a real runtime: unstartable containers, crash loops, and restart policies.

use std::fs;

use serde_json::{Value, json};

use crate::node::{Node, UNTIL_STOPPED, links, shell};
use berth_testkit::{
    image::Image,
    process::{container, manifest_of},
};

fn waiting<'a>(pod: &'a Value, field: &str) -> &'a str {
    container(pod, "main")["state"]["waiting"][field].as_str().unwrap_or_default()
}

/// An image whose user does not exist in its passwd.
const GHOST: &str = "docker.io/library/ghost:1";

/// Each container with its own reason, none runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containers_that_cannot_start_report_the_reason() {
    let Some(node) = Node::shared("containers_that_cannot_start_report_the_reason").await else { return };
    // AC-03b-3, AC-03b-4, AC-03b-5; a bad command and a bad user have no acceptance id
    node.runtime.import("ghost", &[Image { user: "ghost", ..Image::busybox(GHOST) }]);
    let rows = [
        (
            "never",
            json!({"image": "localhost:1/never:1", "imagePullPolicy": "Never"}),
            "ErrImageNeverPull",
            "is not present with pull policy of Never",
        ),
        (
            "nowhere",
            json!({"image": "localhost:1/nowhere:1"}),
            "ImagePullBackOff",
            "Back-off pulling image \"localhost:1/nowhere:1\": ",
        ),
        ("badname", json!({"image": "Not A Name"}), "InvalidImageName", "couldn't parse image name"),
        ("nofile", json!({"command": ["/no/such/program"]}), "CrashLoopBackOff", "back-off"),
        ("nouser", json!({"image": GHOST}), "CreateContainerError", "no users found"),
    ];
    for (name, fields, reason, text) in rows {
        let mut main = json!({"name": "main"});
        for (key, value) in fields.as_object().expect("an object") {
            main[key] = value.clone();
        }
        node.home.put_pod(&manifest_of(name, json!({"containers": [main]})));
        let pod = node.agent.until_pod(name, reason, |pod| waiting(pod, "reason") == reason).await;
        assert!(waiting(&pod, "message").contains(text), "{name}: {:#}", pod["status"]);
        assert_eq!(container(&pod, "main")["ready"], false);
        if name == "nofile" {
            let last = &container(&pod, "main")["lastState"]["terminated"];
            assert_eq!((&last["reason"], &last["exitCode"]), (&json!("StartError"), &json!(128)), "{last:#}");
            assert!(last["message"].as_str().is_some_and(|text| text.contains("/no/such/program")), "{last:#}");
        }
        node.remove(&pod).await;
    }
}

/// A container that fails is restarted with back-off, and its termination message is reported.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crashing_container_is_started_again() {
    let Some(node) = Node::shared("a_crashing_container_is_started_again").await else { return };
    // AC-02b-2
    let mut main = shell("main", "echo run; echo last words > /dev/termination-log; exit 3");
    main["terminationMessagePolicy"] = json!("File");
    let mut speechless = shell("speechless", "echo only in the log; exit 4");
    speechless["terminationMessagePolicy"] = json!("FallbackToLogsOnError");
    let spec =
        json!({"containers": [main, speechless, shell("steady", UNTIL_STOPPED)], "terminationGracePeriodSeconds": 5});
    node.home.put_pod(&manifest_of("crasher", spec));
    let backs_off = |pod: &Value| {
        let main = container(pod, "main");
        waiting(pod, "reason") == "CrashLoopBackOff" && main["restartCount"].as_u64() >= Some(1)
    };
    let pod = node.agent.until_pod("crasher", "backing off", backs_off).await;
    let last = &container(&pod, "main")["lastState"]["terminated"];
    assert_eq!((&last["exitCode"], &last["reason"]), (&json!(3), &json!("Error")), "{last:#}");
    assert_eq!(last["message"], "last words\n");
    assert!(
        waiting(&pod, "message").contains("restarting failed container=main pod=crasher-test-node_default"),
        "{pod:#}"
    );
    let last = &container(&pod, "speechless")["lastState"]["terminated"];
    assert_eq!(last["message"], "only in the log\n", "{last:#}");
    let steady = container(&pod, "steady");
    assert_eq!((&steady["restartCount"], &steady["ready"]), (&json!(0), &json!(true)));
    let count = u32::try_from(container(&pod, "main")["restartCount"].as_u64().expect("a count")).expect("small");
    assert_eq!(node.output(&pod, "main", count), "run\n");
    let link = links("crasher-test-node_default_main-");
    assert!(
        link.iter().any(|link| fs::read_link(link).is_ok_and(|to| to == node.log_file(&pod, "main", count))),
        "{link:?}"
    );
    node.remove(&pod).await;
}

/// Restart policies determine the phase after an exit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_policies_decide_what_an_end_means() {
    let Some(node) = Node::shared("restart_policies_decide_what_an_end_means").await else { return };
    // AC-02b-3, AC-02b-4
    for (name, policy, code, phase) in [
        ("succeeds", "Never", 0, "Succeeded"),
        ("fails", "Never", 5, "Failed"),
        ("onfailure", "OnFailure", 0, "Succeeded"),
    ] {
        let spec = json!({"restartPolicy": policy, "containers": [shell("main", &format!("exit {code}"))]});
        node.home.put_pod(&manifest_of(name, spec));
        let pod = node.agent.until_pod(name, phase, |pod| pod["status"]["phase"] == phase).await;
        assert_eq!(container(&pod, "main")["state"]["terminated"]["exitCode"], code, "{:#}", pod["status"]);
        assert_eq!(container(&pod, "main")["restartCount"], 0);
        node.remove(&pod).await;
    }
}
