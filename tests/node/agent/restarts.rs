//! Agent crashes and restarts: running pods are unaffected, reported pressures last within one boot.

use std::{
    collections::BTreeMap,
    fs,
    sync::{Arc, Mutex},
    time::Duration,
};

use rand::{Rng, SeedableRng, rngs::SmallRng};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::agent::ScriptedServer;
use berth_testkit::{
    process::{condition, get, manifest, manifest_of, skips},
    scripted_cri::Behaviour,
};

/// Observed identity of each running pod, and its violations.
#[derive(Default)]
struct PodIdentityMonitor {
    known: BTreeMap<String, Value>,
    polls: usize,
    wrong: Vec<String>,
}

/// Fields of a pod that an agent restart must not change.
fn lasting(pod: &Value) -> Value {
    let status = &pod["status"];
    let of = |list: &str| -> Vec<Value> {
        let fields = ["name", "containerID", "restartCount", "ready", "started", "imageID", "state", "lastState"];
        let kept = |one: &Value| fields.map(|field| one[field].clone()).into_iter().collect::<Value>();
        status[list].as_array().into_iter().flatten().map(kept).collect()
    };
    let conditions = ["Ready", "ContainersReady", "Initialized", "PodScheduled"].map(|kind| condition(pod, kind));
    json!({
        "uid": pod["metadata"]["uid"], "phase": status["phase"], "conditions": conditions, "podIP": status["podIP"],
        "qosClass": status["qosClass"], "containers": of("containerStatuses"), "init": of("initContainerStatuses"),
    })
}

impl PodIdentityMonitor {
    fn check(&mut self, page: &Value) {
        self.polls += 1;
        for pod in page["items"].as_array().into_iter().flatten() {
            let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            let seen = lasting(pod);
            let known = self.known.entry(name.clone()).or_insert_with(|| seen.clone());
            if *known != seen {
                self.wrong.push(format!("look {}: {name} was {known:#}\nand is {seen:#}", self.polls));
            }
        }
    }
}

/// Polls `/pods` until stopped.
async fn watch(port: u16, watch: Arc<Mutex<PodIdentityMonitor>>, stop: CancellationToken) {
    while !stop.is_cancelled() {
        let answer = get(port, "/pods").await;
        let page = answer.and_then(|answer| serde_json::from_str(&answer.body).ok());
        match page {
            Some(page) => watch.lock().expect("no panic").check(&page),
            None => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crashes_change_nothing_for_running_pods() {
    if skips("crashes_change_nothing_for_running_pods") {
        return;
    }
    let seed = rand::random();
    println!("seed {seed}");
    let mut chance = SmallRng::seed_from_u64(seed);
    let runtime = ScriptedServer::new().await;
    runtime.cri.behave("setup", [Behaviour::exits(0, Duration::from_millis(20))]);
    runtime.cri.behave("once-test-node/main", [Behaviour::exits(3, Duration::ZERO), Behaviour::default()]);
    let home = runtime.home();
    for name in ["plain", "once", "many-1", "many-2", "many-3", "many-4", "many-5"] {
        home.put_pod(&manifest(name));
    }
    let spec = json!({"initContainers": [{"name": "setup"}], "containers": [{"name": "main"}, {"name": "side"}]});
    home.put_pod(&manifest_of("prepared", spec));
    let spec = json!({"containers": [{"name": "main"}], "hostNetwork": true, "restartPolicy": "OnFailure"});
    home.put_pod(&manifest_of("host", spec));
    let mut agent = home.start().await;
    let names = ["plain", "once", "many-1", "many-2", "many-3", "many-4", "many-5", "prepared", "host"];
    for name in names {
        agent.until_ready(name).await;
    }
    let containers = runtime.cri.containers();
    runtime.cri.clear_calls();

    let (seen, stop) = (Arc::new(Mutex::new(PodIdentityMonitor::default())), CancellationToken::new());
    let watching = tokio::spawn(watch(home.read_only_port(), seen.clone(), stop.clone()));
    for round in 0..12 {
        tokio::time::sleep(Duration::from_millis(chance.random_range(0..400))).await;
        agent.kill().await;
        agent = home.spawn();
        if round % 3 == 0 {
            agent.healthy().await;
        }
    }
    agent.healthy().await;
    for name in names {
        agent.until_ready(name).await;
    }
    stop.cancel();
    watching.await.expect("no panic");

    let seen = seen.lock().expect("no panic");
    assert!(seen.polls > 0 && seen.wrong.is_empty(), "{}\n{}", seen.wrong.join("\n"), agent.log_end());
    assert_eq!(runtime.cri.containers(), containers);
    for op in ["create_container", "start_container", "stop_container", "run_podsandbox", "stop_podsandbox"] {
        assert_eq!(runtime.cri.count(op), 0, "{op}: {:?}", runtime.cri.targets(op));
    }
}

/// Crashes during pod starts: each pod starts nevertheless, and never twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crashes_during_starts_double_nothing() {
    if skips("crashes_during_starts_double_nothing") {
        return;
    }
    let seed = rand::random();
    println!("seed {seed}");
    let mut chance = SmallRng::seed_from_u64(seed);
    let runtime = ScriptedServer::new().await;
    for op in ["run_podsandbox", "create_container", "start_container"] {
        runtime.cri.latency(op, Duration::from_millis(40));
    }
    let home = runtime.home();
    let names: Vec<String> = (0..8).map(|number| format!("pod-{number}")).collect();
    for name in &names {
        home.put_pod(&manifest_of(name, json!({"containers": [{"name": "main"}, {"name": "side"}]})));
    }
    let mut agent = home.spawn();
    for _ in 0..6 {
        tokio::time::sleep(Duration::from_millis(chance.random_range(0..500))).await;
        agent.kill().await;
        agent = home.spawn();
    }
    agent.healthy().await;
    for name in &names {
        agent.until_ready(name).await;
    }
    assert_eq!(runtime.cri.violations(), Vec::<String>::new());
    assert_eq!(runtime.cri.history().doubled_sandboxes(), []);
    for name in &names {
        for container in ["main", "side"] {
            assert_eq!(runtime.cri.running(&format!("{name}-test-node"), container).len(), 1, "{name}/{container}");
        }
    }
}

/// A manifest removed while the agent was down removes its pod at the next start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_changed_meanwhile_is_made_up_for() {
    if skips("what_changed_meanwhile_is_made_up_for") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home();
    for name in ["stays", "goes", "dies"] {
        home.put_pod(&manifest(name));
    }
    let agent = home.start().await;
    for name in ["stays", "goes", "dies"] {
        agent.until_ready(name).await;
    }
    let stays = runtime.cri.running("stays-test-node", "main");
    agent.kill().await;
    home.remove("goes.json");
    home.put_pod(&manifest("comes"));
    for id in runtime.cri.running("dies-test-node", "main") {
        runtime.cri.kill(&id, 9, "");
    }
    let agent = home.start().await;
    agent.until_ready("comes").await;
    let died = |pod: &Value| pod["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"] == 9;
    agent.until_pod("dies", "restarted", |pod| died(pod) && condition(pod, "Ready") == Some("True")).await;
    runtime.until("what went is gone", &agent, |cri| cri.running("goes-test-node", "main").is_empty()).await;
    assert_eq!(runtime.cri.running("stays-test-node", "main"), stays);
    assert!(agent.pod("goes").await.is_none());
}

/// A reboot is detected by the kernel's boot ID, also if `--boot-id-file` has a constant ID.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_pressure_is_restored_within_one_boot_of_the_kernel() {
    if skips("memory_pressure_is_restored_within_one_boot_of_the_kernel") {
        return;
    }
    let kernel = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("readable");
    let runtime = ScriptedServer::new().await;
    let home = runtime.home();
    let constant = home.path().join("boot-id");
    fs::write(&constant, "constant\n").expect("written");
    let home = home.flag(format!("--boot-id-file={}", constant.display()));
    let file = home.root().join("eviction_state");
    for (boot_id, is_restored) in [("constant", false), (kernel.trim(), true)] {
        let earlier = json!({"bootId": boot_id, "until": {"MemoryPressure": "2099-01-01T00:00:00Z"}}).to_string();
        fs::write(&file, &earlier).expect("written");
        let agent = home.start().await;
        let is_replaced = async || fs::read_to_string(&file).is_ok_and(|text| text != earlier);
        agent.until("the state of pressures is replaced", is_replaced).await;
        agent.kill().await;
        let text = fs::read_to_string(&file).expect("readable");
        let state: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(state["bootId"], kernel.trim(), "{text}");
        assert_eq!(state["until"]["MemoryPressure"].is_string(), is_restored, "{text}");
    }
}
