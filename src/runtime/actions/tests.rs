//! Table tests for spec 03a §3, row by row, and property tests of invariants.

use jiff::Timestamp;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use berth_types::observation::{Generation, ObservedSandbox};

/// A pod and its observation by the runtime, built step by step.
#[derive(Debug)]
struct Scene {
    pod: Value,
    observed: ObservedPod,
    probes: HashMap<ContainerId, ContainerProbeResults>,
    actuated: Option<PodResources>,
    restart_all: bool,
}

fn scene(policy: &str, init: &[(&str, &str)], regular: &[&str]) -> Scene {
    let init: Vec<Value> = init
        .iter()
        .map(|(name, policy)| match *policy {
            "" => json!({"name": name, "image": "i"}),
            policy => json!({"name": name, "image": "i", "restartPolicy": policy}),
        })
        .collect();
    let regular: Vec<Value> = regular.iter().map(|name| json!({"name": name, "image": "i"})).collect();
    let pod = json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "spec": {"restartPolicy": policy, "initContainers": init, "containers": regular},
    });
    let id = parse(&pod).id().clone();
    Scene {
        pod,
        observed: ObservedPod::empty(id, Generation(1), Timestamp::UNIX_EPOCH),
        probes: HashMap::new(),
        actuated: None,
        restart_all: false,
    }
}

fn parse(pod: &Value) -> Pod {
    Pod::new(serde_json::from_value(pod.clone()).expect("a pod")).expect("complete")
}

fn exited(code: i32) -> (ContainerState, i32) {
    (ContainerState::Exited, code)
}

const RUNNING: (ContainerState, i32) = (ContainerState::Running, 0);
const CREATED: (ContainerState, i32) = (ContainerState::Created, 0);
const UNKNOWN: (ContainerState, i32) = (ContainerState::Unknown, 0);

impl Scene {
    fn sandbox(mut self, attempt: u32, state: SandboxState) -> Self {
        self.observed.sandboxes.push(ObservedSandbox {
            id: format!("sandbox{attempt}").into(),
            attempt,
            state,
            created_at: Timestamp::from_second(i64::from(attempt)).expect("in range"),
            network_mode: NetworkMode::Pod,
            has_network: true,
            ips: vec!["10.0.0.1".parse().expect("an address")],
            runtime_handler: String::new(),
        });
        self.observed.sort();
        self
    }

    fn ready(self) -> Self {
        self.sandbox(0, SandboxState::Ready)
    }

    /// Adds an instance to the newest sandbox.
    fn has(self, name: &str, state: (ContainerState, i32)) -> Self {
        let sandbox = self.observed.sandboxes.first().map_or_else(|| "none".into(), |s| s.id.clone());
        self.has_in(name, state, sandbox)
    }

    fn has_in(mut self, name: &str, (state, exit_code): (ContainerState, i32), sandbox: SandboxId) -> Self {
        let number = self.observed.containers.len();
        let created = i64::try_from(number).expect("few");
        self.observed.containers.push(ObservedContainer {
            id: format!("{name}-{number}").into(),
            name: name.into(),
            sandbox,
            state,
            created_at: Timestamp::from_second(created).expect("in range"),
            started_at: None,
            finished_at: None,
            exit_code,
            reason: String::new(),
            message: String::new(),
            image: String::new(),
            image_ref: String::new(),
            image_id: String::new(),
            hash: Some(hash::container_hash(name, "i")),
            restart_count: 0,
            log_path: String::new(),
            resources: None,
            user: None,
        });
        self.observed.sort();
        self
    }

    fn last(&mut self) -> &mut ObservedContainer {
        self.observed.containers.first_mut().expect("one was added")
    }

    fn probed(mut self, startup: Option<ProbeVerdict>, liveness: Option<ProbeVerdict>) -> Self {
        let id = self.last().id.clone();
        self.probes.insert(id, ContainerProbeResults { startup, liveness });
        self
    }

    fn set(mut self, path: &str, value: Value) -> Self {
        let (parent, key) = path.rsplit_once('/').expect("a path");
        self.pod.pointer_mut(parent).expect("an existing parent")[key] = value;
        self
    }

    fn actions(&self) -> PodActions {
        let pod = parse(&self.pod);
        compute(&PodActionInputs {
            pod: &pod,
            observed: &self.observed,
            probes: &self.probes,
            actuated: self.actuated.as_ref(),
            restart_all: self.restart_all,
            gates: Gates::default(),
        })
    }
}

/// Formats actions as `kill-pod create:<attempt> old:<id> kill:<name>(<message>) reset:… init:… eph:…
/// run:…`, without the empty parts.
fn format_actions(actions: &PodActions) -> String {
    let mut words: Vec<String> = Vec::new();
    if actions.kill_pod {
        words.push("kill-pod".to_owned());
    }
    if actions.create_sandbox {
        words.push(format!("create:{}", actions.attempt));
    }
    if let Some(id) = actions.sandbox.as_ref().filter(|_| actions.kill_pod && actions.create_sandbox) {
        words.push(format!("old:{id}"));
    }
    words.extend(actions.kill.iter().map(|k| format!("kill:{}({})", k.id, k.message)));
    words.extend(actions.reset.iter().map(|r| format!("reset:{}{}", r.id, if r.kill_first { "!" } else { "" })));
    words.extend(actions.start_init.iter().map(|i| format!("init:{i}")));
    words.extend(actions.start_ephemeral.iter().map(|i| format!("eph:{i}")));
    words.extend(actions.start.iter().map(|i| format!("run:{i}")));
    words.join(" ")
}

fn expect(case: &str, scene: Scene, words: &str) {
    assert_eq!(format_actions(&scene.actions()), words, "{case}");
}

#[test]
fn a_sandbox_is_replaced_when_it_does_not_fit() {
    use SandboxState::{NotReady, Ready};
    let plain = || scene("Always", &[], &["a"]);
    expect("AC-03a-1", scene("Always", &[], &["a", "b", "c"]), "kill-pod create:0 run:0 run:1 run:2");
    expect("fine", plain().ready().has("a", RUNNING), "");
    let two = plain().sandbox(0, Ready).sandbox(1, Ready).has("a", RUNNING);
    expect("two ready", two, "kill-pod create:2 old:sandbox1 run:0");
    let dead = plain().sandbox(3, NotReady).has("a", exited(0));
    expect("not ready", dead, "kill-pod create:4 old:sandbox3 run:0");
    let host = plain().ready().has("a", RUNNING).set("/spec/hostNetwork", json!(true));
    expect("wrong network: nothing kept, no event", host, "kill-pod create:1 run:0");
    let mut no_ip = plain().ready().has("a", RUNNING);
    no_ip.observed.sandboxes[0].ips.clear();
    expect("no address", no_ip, "kill-pod create:1 old:sandbox0 run:0");
    let mut silent = plain().ready().has("a", RUNNING);
    silent.observed.sandboxes[0].ips.clear();
    silent.observed.sandboxes[0].has_network = false;
    expect("no network message", silent, "");
    let former = plain().sandbox(0, NotReady).sandbox(1, Ready).has("a", RUNNING);
    expect("an older one may be dead", former, "");
}

#[test]
fn a_new_sandbox_starts_what_is_left_to_do() {
    use SandboxState::NotReady;
    let dead =
        |policy: &str, init: &[(&str, &str)], regular: &[&str]| scene(policy, init, regular).sandbox(0, NotReady);
    let with_init = dead("Always", &[("i", "")], &["a"]).has("i", exited(0)).has("a", exited(1));
    expect("AC-03a-2", with_init, "kill-pod create:1 old:sandbox0 init:0");
    let never = scene("Never", &[], &["a"]).sandbox(1, NotReady).has("a", exited(0));
    expect("AC-03a-3", never, "kill-pod");
    expect("Never, nothing ever ran", dead("Never", &[], &["a"]), "kill-pod create:1 old:sandbox0 run:0");
    let on_failure = dead("OnFailure", &[], &["a", "b", "c"]).has("b", exited(0)).has("a", exited(1));
    expect("AC-03a-4", on_failure, "kill-pod create:1 old:sandbox0 run:0 run:2");
    expect("OnFailure, all done", dead("OnFailure", &[], &["a"]).has("a", exited(0)), "kill-pod");
    let own =
        dead("Always", &[], &["a"]).has("a", exited(0)).set("/spec/containers/0/restartPolicy", json!("OnFailure"));
    expect("the container's own policy counts", own, "kill-pod");
    expect("no containers at all", scene("Always", &[], &[]), "kill-pod");
    expect("no containers at all, and a sandbox", scene("Always", &[], &[]).ready(), "kill-pod");
    expect("no regular containers", dead("Always", &[("i", "")], &[]).has("i", exited(0)), "kill-pod");
    let first = scene("OnFailure", &[("s", "Always")], &["a"]);
    expect("init before regular", first, "kill-pod create:0 init:0");
}

#[test]
fn a_restart_of_all_removes_every_instance_sources_last() {
    let rule = json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
    let mut all = scene("Never", &[("i", "")], &["a", "b"])
        .ready()
        .has("i", exited(0))
        .has("b", exited(42))
        .has("b", RUNNING)
        .has("a", exited(42))
        .set("/spec/containers/0/restartPolicy", json!("Never"))
        .set("/spec/containers/0/restartPolicyRules", rule);
    all.restart_all = true;
    expect("order", all, "reset:b-2! reset:b-1 reset:i-0 reset:a-3");
    let mut without_sandbox = scene("Always", &[], &["a"]);
    without_sandbox.restart_all = true;
    expect("the sandbox keeps its decision", without_sandbox, "kill-pod create:0");
}

#[test]
fn ephemeral_containers_start_once_even_during_init() {
    let with = |scene: Scene| scene.set("/spec/ephemeralContainers", json!([{"name": "e"}]));
    expect("at init", with(scene("Always", &[("i", "")], &["a"]).ready().has("i", RUNNING)), "eph:0");
    let ran = with(scene("Always", &[], &["a"]).ready().has("a", RUNNING).has("e", exited(1)));
    expect("never again", ran, "");
}

#[test]
fn plain_init_containers_run_one_after_the_other() {
    let pod = |policy: &str| scene(policy, &[("i", ""), ("j", "")], &["a"]).ready();
    expect("first", pod("Always"), "init:0");
    expect("created again", pod("Always").has("i", CREATED), "init:0");
    expect("wait", pod("Always").has("i", RUNNING), "");
    expect("next", pod("Always").has("i", exited(0)), "init:1");
    expect("done", pod("Always").has("i", exited(0)).has("j", exited(0)), "run:0");
    expect("the last one is enough", pod("Always").has("j", exited(0)), "run:0");
    expect("failed", pod("OnFailure").has("i", exited(1)), "init:0");
    expect("failed for good", pod("Never").has("i", exited(1)), "kill-pod");
    let killed = |policy: &str| {
        let mut killed = pod(policy).has("i", exited(0));
        killed.last().reason = "OOMKilled".to_owned();
        killed
    };
    expect("AC-03a-5", killed("Always"), "init:0");
    expect("out of memory, Never", killed("Never"), "kill-pod");
    let message = "Init container is in \"unknown\" state, try killing it before restart";
    expect("unknown", pod("Always").has("i", UNKNOWN), &format!("kill:i-0({message}) init:0"));
    expect("unknown for good", pod("Never").has("i", UNKNOWN), "kill-pod");
    expect("ignored once regular ones run", pod("Never").has("i", exited(1)).has("a", RUNNING), "");
}

#[test]
fn only_the_newest_sandbox_counts_for_init() {
    use SandboxState::{NotReady, Ready};
    // k8s #137710, #137720: leftovers of an old sandbox do not count as progress in the new one.
    let left = scene("Always", &[("i", "")], &["a"])
        .sandbox(0, NotReady)
        .has("i", exited(0))
        .has("a", CREATED)
        .sandbox(1, Ready);
    expect("leftovers", left, "init:0");
    let done = scene("OnFailure", &[], &["a", "b"])
        .sandbox(0, NotReady)
        .has("a", exited(0))
        .sandbox(1, Ready)
        .has("b", RUNNING);
    expect("but success is for good", done, "");
    let stray = scene("Always", &[], &["a"]).sandbox(0, NotReady).has("a", RUNNING).sandbox(1, Ready);
    expect("a stray is replaced", stray, "kill:a-0(Container a runs in a previous sandbox, will be restarted) run:0");
}

#[test]
fn sidecars_come_up_in_order_and_stay_up() {
    let pod = || scene("Always", &[("s", "Always"), ("i", "")], &["a"]).ready();
    let probe = json!({"exec": {"command": ["true"]}});
    let probed = || pod().set("/spec/initContainers/0/startupProbe", probe.clone());
    expect("next", pod().has("s", RUNNING), "init:1");
    expect("AC-03a-6", probed().has("s", RUNNING), "");
    let started = probed().has("s", RUNNING).probed(Some(ProbeVerdict::Success), None);
    expect("started", started, "init:1");
    let failed = probed().has("s", RUNNING).probed(Some(ProbeVerdict::Failure), None);
    expect("startup failed", failed, "kill:s-0(Init container s failed startup probe) init:0");
    let live = || pod().set("/spec/initContainers/0/livenessProbe", probe.clone());
    let sick = live().has("s", RUNNING).probed(None, Some(ProbeVerdict::Failure));
    expect("liveness failed", sick, "kill:s-0(Init container s failed liveness probe) init:0 init:1");
    let mut changed = pod().has("s", RUNNING);
    changed.last().hash = Some(1);
    expect("changed", changed, "kill:s-0(Init container s definition changed) init:0 init:1");
    expect("exited early", pod().has("s", exited(0)), "init:0");
    expect("created", pod().has("s", CREATED), "init:0");
    let message = "Init container is in \"unknown\" state, try killing it before restart";
    expect("unknown", pod().has("s", UNKNOWN), &format!("kill:s-0({message}) init:0"));
    expect("exited later", pod().has("s", exited(1)).has("i", exited(0)).has("a", RUNNING), "init:0");
    expect("lost later", pod().has("i", exited(0)).has("a", RUNNING), "init:0");
    let last = scene("Never", &[("s", "Always")], &["a"]).ready();
    expect("the last one running initialises", last.has("s", RUNNING), "run:0");
}

#[test]
fn a_finished_pod_takes_its_sidecars_down() {
    let pod = scene("Never", &[("s", "Always")], &["a", "b"]).ready().has("s", RUNNING);
    expect("AC-03a-7", pod.has("a", exited(0)).has("b", exited(0)), "kill-pod");
    let crashed = scene("Never", &[("s", "Always"), ("t", "Always")], &["a"]).ready();
    expect("none is restarted", crashed.has("s", exited(1)).has("t", RUNNING).has("a", exited(0)), "kill-pod");
}

#[test]
fn regular_containers_follow_their_policy() {
    let pod = |policy: &str| scene(policy, &[], &["a"]).ready();
    expect("new", pod("Never"), "run:0");
    expect("created", pod("Never").has("a", CREATED), "run:0");
    expect("exited, Always", pod("Always").has("a", exited(0)), "run:0");
    expect("exited, OnFailure", pod("OnFailure").has("a", exited(0)), "kill-pod");
    expect("failed, OnFailure", pod("OnFailure").has("a", exited(1)), "run:0");
    expect("failed, Never", pod("Never").has("a", exited(1)), "kill-pod");
    let message = "Container is in \"unknown\" state, try killing it before restart";
    expect("unknown", pod("Never").has("a", UNKNOWN), &format!("kill:a-0({message}) run:0"));
    let deleting = pod("Always").has("a", exited(1)).set("/metadata/deletionTimestamp", json!("2026-01-01T00:00:00Z"));
    expect("deleting", deleting, "kill-pod");
    let mut changed = pod("Never").has("a", RUNNING);
    changed.last().hash = Some(1);
    expect("AC-03a-8", changed, "kill:a-0(Container a definition changed, will be restarted) run:0");
    let mut unlabelled = pod("Never").has("a", RUNNING);
    unlabelled.last().hash = None;
    expect("no hash", unlabelled, "kill:a-0(Container a definition changed, will be restarted) run:0");
}

#[test]
fn failed_probes_kill_and_policy_decides_what_follows() {
    let live = |policy: &str| {
        scene(policy, &[], &["a", "b"])
            .ready()
            .has("b", RUNNING)
            .has("a", RUNNING)
            .probed(None, Some(ProbeVerdict::Failure))
    };
    let again = live("OnFailure");
    assert_eq!(again.actions().kill[0].cause, ContainerKillReason::LivenessProbe);
    expect("liveness", again, "kill:a-1(Container a failed liveness probe, will be restarted) run:0");
    expect("liveness, Never", live("Never"), "kill:a-1(Container a failed liveness probe)");
    let own = live("Always").set("/spec/containers/0/restartPolicy", json!("Never"));
    expect("own policy", own, "kill:a-1(Container a failed liveness probe)");
    let alone = || {
        let pod = scene("Never", &[], &["a"]).ready().has("a", RUNNING).probed(None, Some(ProbeVerdict::Failure));
        pod.set("/spec/containers/0/restartPolicy", json!("Never"))
    };
    expect("the last one", alone(), "kill-pod kill:a-0(Container a failed liveness probe)");
    let rules = json!([{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]);
    let with_rules = alone().set("/spec/containers/0/restartPolicyRules", rules);
    expect("rules wait for its exit code", with_rules, "kill:a-0(Container a failed liveness probe)");
    let startup = scene("Always", &[], &["a"]).ready().has("a", RUNNING).probed(Some(ProbeVerdict::Failure), None);
    assert_eq!(startup.actions().kill[0].cause, ContainerKillReason::StartupProbe);
    expect("startup", startup, "kill:a-0(Container a failed startup probe, will be restarted) run:0");
    let alone = scene("Never", &[], &["a"]).ready().has("a", RUNNING).probed(None, Some(ProbeVerdict::Failure));
    assert!(alone.actions().kill_pod, "nothing kept and nothing to start");
}

#[test]
fn restart_rules_count_for_exit_codes_only() {
    let rule = json!([{"action": "Restart", "exitCodes": {"operator": "In", "values": [7]}}]);
    let pod = || {
        scene("Never", &[], &["a", "b"])
            .ready()
            .has("b", RUNNING)
            .set("/spec/containers/0/restartPolicy", json!("Never"))
            .set("/spec/containers/0/restartPolicyRules", rule.clone())
    };
    expect("matches", pod().has("a", exited(7)), "run:0");
    expect("does not match", pod().has("a", exited(8)), "");
}

#[test]
fn resources_change_in_place_or_by_restart() {
    let pod = |policy: &str| {
        let mut scene = scene("Never", &[], &["a", "b"])
            .ready()
            .has("b", RUNNING)
            .has("a", RUNNING)
            .set("/spec/containers/0/resources", json!({"requests": {"cpu": "2"}}))
            .set("/spec/containers/0/resizePolicy", json!([{"resourceName": "cpu", "restartPolicy": policy}]));
        scene.actuated = Some(PodResources::default());
        scene
    };
    let in_place = pod("NotRequired").actions();
    assert_eq!(format_actions(&in_place), "");
    assert_eq!(in_place.resize.cpu.len(), 1);
    let restart = pod("RestartContainer");
    assert!(restart.actions().resize.pod);
    expect("restart", restart, "kill:a-1(Container a resize requires restart) run:0");
    let level = scene("Never", &[], &["a"]).ready().has("a", RUNNING);
    let level = level.set("/spec/resources", json!({"limits": {"cpu": "1"}}));
    assert!(level.actions().resize.pod_level);
}

fn any_state() -> impl Strategy<Value = Option<(ContainerState, i32)>> {
    prop_oneof![
        Just(None),
        Just(Some(RUNNING)),
        Just(Some(CREATED)),
        Just(Some(UNKNOWN)),
        (0..3).prop_map(|code| Some(exited(code))),
    ]
}

fn any_scene() -> impl Strategy<Value = Scene> {
    let policy = prop_oneof![Just("Always"), Just("OnFailure"), Just("Never")];
    let verdict = prop_oneof![Just(None), Just(Some(ProbeVerdict::Success)), Just(Some(ProbeVerdict::Failure))];
    let init = prop::collection::vec((any::<bool>(), any_state(), any::<bool>()), 0..4);
    let regular = prop::collection::vec((any_state(), verdict.clone(), any::<bool>()), 1..4);
    (policy, init, regular, 0..4_u8, any::<bool>()).prop_map(|(policy, init, regular, sandboxes, restart_all)| {
        let names = ["i0", "i1", "i2", "i3"];
        let kinds: Vec<(&str, &str)> =
            init.iter().zip(names).map(|((sidecar, ..), name)| (name, if *sidecar { "Always" } else { "" })).collect();
        let mut scene = scene(policy, &kinds, &["a", "b", "c"][..regular.len()]);
        scene.restart_all = restart_all;
        if sandboxes > 0 {
            scene = scene.sandbox(0, if sandboxes == 1 { SandboxState::NotReady } else { SandboxState::Ready });
        }
        if sandboxes == 3 {
            scene = scene.sandbox(1, SandboxState::Ready);
            scene.observed.sandboxes[1].state = SandboxState::NotReady;
        }
        for ((_, state, old), name) in init.into_iter().zip(names) {
            scene = add(scene, name, state, old);
        }
        for ((state, liveness, old), name) in regular.into_iter().zip(["a", "b", "c"]) {
            scene = add(scene, name, state, old);
            if state.is_some() {
                scene = scene.probed(None, liveness);
            }
        }
        scene
    })
}

fn add(scene: Scene, name: &str, state: Option<(ContainerState, i32)>, old: bool) -> Scene {
    match state {
        None => scene,
        Some(state) if old => scene.has_in(name, state, "sandbox0".into()),
        Some(state) => scene.has(name, state),
    }
}

proptest! {
    #[test]
    fn whatever_the_pod_a_plan_makes_sense(scene in any_scene()) {
        let pod = parse(&scene.pod);
        let actions = scene.actions();
        let killed: Vec<&str> = actions.kill.iter().map(|k| k.name.as_str()).collect();
        // A running container is never started unless it is killed before.
        if !actions.kill_pod {
            for &index in &actions.start {
                let name = pod.containers()[index].name.as_str();
                let runs = scene.observed.newest(name).is_some_and(|c| c.state == ContainerState::Running);
                prop_assert!(!runs || killed.contains(&name), "{name} runs");
            }
            for &index in &actions.start_init {
                let name = pod.init_containers()[index].name.as_str();
                let runs = scene.observed.active().any(|c| &*c.name == name && c.state == ContainerState::Running);
                prop_assert!(!runs || killed.contains(&name), "{name} runs");
            }
        }
        // Init containers start in order, each once; plain ones one at a time, and the other containers
        // of the pod only when a later observation shows them done.
        prop_assert!(actions.start_init.windows(2).all(|pair| pair[0] < pair[1]), "{:?}", actions.start_init);
        let plain = |i: &&usize| !Pod::is_sidecar(&pod.init_containers()[**i]);
        prop_assert!(actions.start_init.iter().filter(plain).count() <= 1);
        if !pod.init_containers().is_empty() && !actions.start.is_empty() {
            prop_assert!(actions.start_init.iter().filter(plain).count() == 0);
        }
        prop_assert!(actions.start.windows(2).all(|pair| pair[0] < pair[1]));
        // A sandbox is only created after everything before it is stopped.
        prop_assert!(!actions.create_sandbox || actions.kill_pod);
        if scene.restart_all {
            prop_assert!(actions.start_init.is_empty() && actions.start.is_empty());
            prop_assert!(actions.start_ephemeral.is_empty() && actions.kill.is_empty());
        }
        // Killing a pod without a new sandbox starts nothing.
        if actions.kill_pod && !actions.create_sandbox && !scene.restart_all {
            prop_assert!(actions.start.is_empty() && actions.start_init.is_empty());
        }
        // The same inputs yield the same actions.
        prop_assert_eq!(actions, scene.actions());
    }
}
