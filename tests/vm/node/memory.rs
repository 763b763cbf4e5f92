//! OOM kills of containers over their memory limit.
//!
//! Behavior: spec 06 (`singleProcessOOMKill`), 09a §12.

use serde_json::{Value, json};

use crate::node::inside::{ClusterFixture, counted, file, log, scope, sized, slice, until};
use berth_testkit::process::container;

/// A child process that allocates until it is killed.
const EATS: &str = "tail /dev/zero";

fn limited(script: &str) -> Value {
    let mut spec = sized(script, json!({"limits": {"cpu": "500m", "memory": "24Mi"}}));
    spec["restartPolicy"] = json!("Never");
    spec
}

pub async fn a_container_over_its_limit_ends_as_a_whole(world: &ClusterFixture) {
    world.run("whole", limited(&format!("{EATS} & while :; do sleep 1; done")));
    let is_over = |pod: &Value| pod["status"]["phase"] == "Failed";
    let pod = world.until_pod("whole", "is over", is_over).await;
    let end = &container(&pod, "main")["state"]["terminated"];
    assert_eq!((&end["reason"], &end["exitCode"]), (&json!("OOMKilled"), &json!(137)), "{end:#}");
    let message = world.until_event("whole", "OOMKilled").await;
    assert!(message.ends_with("was killed: a memory limit was reached"), "{message}");
    world.remove(["whole"]).await;
}

/// The agent runs with `singleProcessOOMKill` from the previous check.
pub async fn a_process_over_the_limit_ends_alone(world: &ClusterFixture) {
    // AC-06a-22
    world.run("alone", limited(&format!("{EATS}; echo it ended with $?; exec sleep 100000")));
    let [pod] = world.until_ready(["alone"]).await;
    until("the shell tells of its child's end", async || log(&pod).contains("it ended with 137").then_some(())).await;
    let group = scope(&pod);
    assert_eq!(file(&group, "memory.oom.group"), "0");
    assert_eq!(counted(&group, "memory.events", "oom_kill"), 1);
    assert_eq!(counted(&slice(&pod), "memory.events", "oom_kill"), 1);
    let message = world.until_event("alone", "OOMKilled").await;
    assert!(message.starts_with("Process tail (pid "), "{message}");
    // The container continues, and its later exit is not an OOM kill.
    let pod = world.pod("alone");
    let main = container(&pod, "main");
    assert!(main["state"]["running"].is_object() && main["restartCount"] == 0, "{main:#}");
    world.remove(["alone"]).await;
}
