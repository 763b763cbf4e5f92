//! Probes of real containers (spec 05 §1).

use std::{fs, time::Instant};

use serde_json::{Value, json};

use crate::node::{Node, UNTIL_STOPPED, shell};
use berth_testkit::{
    process::{condition, container, manifest_of},
    real,
};

/// Number of processes on the machine with that command line.
fn processes(command: &str) -> usize {
    let is_it = |path: std::path::PathBuf| {
        fs::read(path.join("cmdline"))
            .is_ok_and(|line| String::from_utf8_lossy(&line).trim_end_matches('\0').replace('\0', " ") == command)
    };
    fs::read_dir("/proc").expect("a folder").filter(|entry| entry.as_ref().is_ok_and(|e| is_it(e.path()))).count()
}

fn exec(command: &[&str]) -> Value {
    json!({"exec": {"command": command}, "periodSeconds": 1, "failureThreshold": 1})
}

/// Exec probes determine readiness and liveness.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_decide() {
    let Some(node) = Node::shared("commands_decide").await else { return };
    let script = format!("touch /alive /ready; {UNTIL_STOPPED}");
    let mut main = shell("main", &script);
    main["env"] = json!([{"name": "FILE", "value": "/ready"}]);
    main["startupProbe"] = exec(&["test", "-e", "/alive"]);
    main["startupProbe"]["failureThreshold"] = json!(60);
    main["readinessProbe"] = exec(&["test", "-e", "$(FILE)"]);
    main["livenessProbe"] = exec(&["test", "-e", "/alive"]);
    let spec = json!({"terminationGracePeriodSeconds": 5, "containers": [main]});
    let pod = node.run(&manifest_of("asked", spec)).await;
    let root = format!("/proc/{}/root", node.pid(&pod, "main"));
    fs::remove_file(format!("{root}/ready")).expect("it was there");
    let name = "asked";
    let is_unready =
        |pod: &Value| condition(pod, "Ready") == Some("False") && container(pod, "main")["restartCount"] == 0;
    node.agent.until_pod(name, "not ready, and not restarted", is_unready).await;
    fs::write(format!("{root}/ready"), "").expect("writable");
    node.agent.until_ready(name).await;
    fs::remove_file(format!("{root}/alive")).expect("it was there");
    let is_back = |pod: &Value| container(pod, "main")["restartCount"] == 1 && condition(pod, "Ready") == Some("True");
    node.agent.until_pod(name, "restarted and ready", is_back).await;
    assert!(node.agent.log().contains("Container main failed liveness probe, will be restarted"));
    node.remove(&pod).await;
}

/// AC-05-10: a probe that times out is killed, on the embedded runtime with all its child processes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_process_outlives_its_timeout() {
    let Some(node) = Node::shared("no_process_outlives_its_timeout").await else { return };
    // Each attempt writes a line; once the file exists, it passes and leaves no process behind.
    let probed = |name: &str, rest: &str| {
        let mut probed = shell(name, UNTIL_STOPPED);
        let script = format!("echo >> /begun; test -e /enough && exit 0; {rest}");
        probed["livenessProbe"] = exec(&["sh", "-c", &script]);
        probed["livenessProbe"]["failureThreshold"] = json!(1000);
        probed
    };
    let mut containers = vec![probed("main", "exec sleep 4321")];
    if real::is_embedded() {
        let forks = "sleep 4322 & setsid sleep 4324 & (setsid sleep 4325 &) ; sleep 4323; true";
        containers.push(probed("forks", forks));
    }
    let names: Vec<&str> = if containers.len() == 2 { vec!["main", "forks"] } else { vec!["main"] };
    let commands = ["sleep 4321", "sleep 4322", "sleep 4323", "sleep 4324", "sleep 4325"];
    let spec = json!({"terminationGracePeriodSeconds": 5, "containers": containers});
    let pod = node.run(&manifest_of("late", spec)).await;
    let line = node.agent.until_log("Liveness probe failed: command timed out: ").await;
    assert!(line.contains("timed out after 1s"), "{line}");
    let roots: Vec<String> = names.iter().map(|name| format!("/proc/{}/root", node.pid(&pod, name))).collect();
    // An attempt starts after the previous one has timed out.
    let begun = |root: &String| fs::read_to_string(format!("{root}/begun")).map_or(0, |lines| lines.lines().count());
    node.agent.until("as many as would pile up", async || roots.iter().all(|root| begun(root) >= 7)).await;
    for command in commands {
        assert!(processes(command) <= 2, "{} of {command}", processes(command));
    }
    for root in &roots {
        fs::write(format!("{root}/enough"), "").expect("writable");
    }
    for command in commands {
        node.agent.until(&format!("none is left of {command}"), async || processes(command) == 0).await;
    }
    let runs_on = |pod: &Value| names.iter().all(|name| container(pod, name)["restartCount"] == 0);
    node.agent.until_pod("late", "it runs on as it began", runs_on).await;
    assert_eq!(names.iter().map(|name| format!("/proc/{}/root", node.pid(&pod, name))).collect::<Vec<_>>(), roots);
    node.remove(&pod).await;
}

/// AC-05-9: a container that fails liveness and ignores SIGTERM gets its probe's grace period, not its pod's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_probe_has_a_grace_period_of_its_own() {
    const GRACE: u64 = 5;
    let Some(node) = Node::shared("a_probe_has_a_grace_period_of_its_own").await else { return };
    // Only the first instance ignores SIGTERM, so that the test can end.
    let script = format!(
        "touch /alive; test -e /kept/again || {{ touch /kept/again; trap '' TERM; while :; do sleep 1; done; }}; {UNTIL_STOPPED}"
    );
    let mut main = shell("main", &script);
    main["volumeMounts"] = json!([{"name": "kept", "mountPath": "/kept"}]);
    main["startupProbe"] = exec(&["test", "-e", "/alive"]);
    main["startupProbe"]["failureThreshold"] = json!(60);
    main["livenessProbe"] = exec(&["test", "-e", "/alive"]);
    main["livenessProbe"]["terminationGracePeriodSeconds"] = json!(GRACE);
    let spec = json!({"terminationGracePeriodSeconds": 600, "containers": [main],
        "volumes": [{"name": "kept", "emptyDir": {}}]});
    let pod = node.run(&manifest_of("deaf", spec)).await;
    let root = format!("/proc/{}/root", node.pid(&pod, "main"));
    let begun = Instant::now();
    fs::remove_file(format!("{root}/alive")).expect("it was there");
    let is_back = |pod: &Value| container(pod, "main")["restartCount"] == 1;
    node.agent.until_pod("deaf", "killed and restarted", is_back).await;
    let took = begun.elapsed().as_secs();
    assert!((GRACE..GRACE + 30).contains(&took), "after {took} s");
    node.remove(&pod).await;
}

/// HTTP probes use the pod's own address and the port's name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_are_asked_at_the_pods_address() {
    let Some(node) = Node::shared("servers_are_asked_at_the_pods_address").await else { return };
    let script = "mkdir /www; echo fine > /www/health; exec httpd -f -p 8081 -h /www";
    let mut main = shell("main", script);
    main["ports"] = json!([{"name": "web", "containerPort": 8081}]);
    main["readinessProbe"] = json!({"httpGet": {"port": "web", "path": "/health"}, "periodSeconds": 1});
    main["livenessProbe"] = json!({"tcpSocket": {"port": 8081}, "periodSeconds": 1, "failureThreshold": 30});
    let mut other = shell("other", UNTIL_STOPPED);
    other["readinessProbe"] = json!({"tcpSocket": {"port": 8081}, "periodSeconds": 1});
    let spec = json!({"terminationGracePeriodSeconds": 1, "containers": [main, other]});
    let pod = node.run(&manifest_of("served", spec)).await;
    let root = format!("/proc/{}/root", node.pid(&pod, "main"));
    fs::remove_file(format!("{root}/www/health")).expect("it was there");
    let is_unready = |pod: &Value| container(pod, "main")["ready"] == false && container(pod, "other")["ready"] == true;
    let unready = node.agent.until_pod("served", "not ready", is_unready).await;
    assert_eq!(container(&unready, "main")["restartCount"], 0);
    assert!(node.agent.log().contains("Readiness probe failed: HTTP probe failed with statuscode: 404"));
    node.remove(&pod).await;
}

/// Restart rules match the exit code, also if the probe killed the pod's only container.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_killed_by_its_probe_is_restarted_by_its_rules() {
    let Some(node) = Node::shared("a_container_killed_by_its_probe_is_restarted_by_its_rules").await else { return };
    for (name, code, restarts) in [("ruled", 42, true), ("unruled", 7, false)] {
        let script = format!("trap 'exit {code}' TERM; while true; do sleep 0.1; done");
        let mut main = shell("main", &script);
        main["restartPolicy"] = json!("Never");
        main["restartPolicyRules"] = json!([{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]);
        main["livenessProbe"] = json!({"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1, "initialDelaySeconds": 1});
        let spec = json!({"restartPolicy": "Never", "terminationGracePeriodSeconds": 10, "containers": [main]});
        node.home.put_pod(&manifest_of(name, spec));
        let is_so = |pod: &Value| match restarts {
            true => container(pod, "main")["restartCount"].as_i64() >= Some(1),
            false => pod["status"]["phase"] == "Failed",
        };
        let pod = node.agent.until_pod(name, "as its rules say", is_so).await;
        if !restarts {
            assert_eq!(container(&pod, "main")["restartCount"], 0, "{pod:#}");
        }
        node.remove(&pod).await;
    }
}
