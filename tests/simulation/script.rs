//! Script of a run: random user actions and faults, drawn from the seed.

use std::{sync::Arc, time::Duration};

use berth_types::{Pod, PodSource, PodUid};
use rand::{Rng, seq::IndexedRandom, seq::IteratorRandom};
use serde_json::{Value, json};
use tonic::Code;

use crate::{profile::FaultKind, run_state::RunState};
use berth_testkit::{
    kill_switch::KillPoint,
    pods,
    scripted_cri::{Behaviour, EventFaults, Fault},
};

/// Names that are not substrings of anything else in the calls.
const STATIC: [&str; 4] = ["wa", "wb", "wc", "wd"];
const API: [&str; 4] = ["xa", "xb", "xc", "xd"];
const OPERATIONS: [&str; 12] = [
    "run_podsandbox",
    "stop_podsandbox",
    "remove_podsandbox",
    "podsandbox_status",
    "list_podsandbox",
    "list_containers",
    "container_status",
    "create_container",
    "start_container",
    "stop_container",
    "remove_container",
    "status",
];

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Runs the script.
pub async fn play(world: &mut RunState) -> Result<(), String> {
    if world.profile.has(FaultKind::Latency) {
        for operation in OPERATIONS {
            let latency = ms(world.chance.random_range(1..150));
            world.machine.cri.latency(operation, latency);
            world.accounts.latency += latency;
        }
    }
    for _ in 0..world.chance.random_range(0..3) {
        add_static(world);
    }
    if !world.profile.has(FaultKind::SlowSources) {
        world.up().await;
    }
    for _ in 0..world.chance.random_range(10..28) {
        let pause = match world.chance.random_range(0..10) {
            0..4 => Duration::ZERO,
            4..9 => ms(world.chance.random_range(1..1500)),
            _ => ms(world.chance.random_range(2000..20_000)),
        };
        world.wait(pause).await?;
        step(world).await;
    }
    Ok(())
}

async fn step(world: &mut RunState) {
    let slow = world.profile.has(FaultKind::SlowSources);
    if world.agent.is_none() && world.chance.random_bool(0.5) {
        world.agent = Some(world.machine.start().await);
        world.note("agent started".to_owned());
        if world.profile.has(FaultKind::AgentKilled) && world.chance.random_bool(0.3) {
            set_fuse(world);
        }
        if !slow {
            world.up().await;
        }
    } else if world.chance.random_bool(0.5) {
        for source in [PodSource::File, PodSource::Api] {
            if !world.synced_sources.contains(&source) && world.agent.is_some() {
                world.note(format!("{} answers", source.as_str()));
                world.hand_in(source).await;
            }
        }
    }
    if world.chance.random_bool(0.6) { user_action(world).await } else { trouble(world).await }
}

/// One user action.
async fn user_action(world: &mut RunState) {
    match world.chance.random_range(0..12) {
        0..3 => {
            add_static(world);
            world.changed(PodSource::File).await;
        }
        3..5 => {
            add_api(world);
            world.changed(PodSource::Api).await;
        }
        5 => change_static(world).await,
        6 => remove_static(world, false).await,
        7 => remove_static(world, true).await,
        8 => delete(world).await,
        9 => shorten(world).await,
        10 => force(world).await,
        _ => change_image(world).await,
    }
}

fn draw_name(world: &mut RunState, names: &[&str]) -> String {
    (*names.choose(&mut world.chance).expect("names")).to_owned()
}

fn add_static(world: &mut RunState) {
    let name = draw_name(world, &STATIC);
    if !world.files.contains_key(&name) {
        let pod = draw_pod(world, &name, "file");
        world.note(format!("+ static {} {}", pod.uid(), summary(&pod)));
        world.files.insert(name, pod);
    }
}

fn add_api(world: &mut RunState) {
    let name = draw_name(world, &API);
    if world.api.values().any(|pod| pod.name() == name) {
        return; // names are unique in the API server
    }
    let pod = draw_pod(world, &name, "api");
    world.note(format!("+ api {} {}", pod.uid(), summary(&pod)));
    world.api.insert(pod.uid().clone(), pod);
}

async fn change_static(world: &mut RunState) {
    let Some(name) = world.files.keys().choose(&mut world.chance).cloned() else { return };
    let pod = draw_pod(world, &name, "file");
    world.note(format!("~ static {} {}", pod.uid(), summary(&pod)));
    world.files.insert(name, pod);
    world.changed(PodSource::File).await;
}

/// Removes a manifest, and perhaps restores it unchanged.
async fn remove_static(world: &mut RunState, back: bool) {
    let Some(name) = world.files.keys().choose(&mut world.chance).cloned() else { return };
    let Some(pod) = world.files.remove(&name) else { return };
    world.note(format!("- static {}", pod.uid()));
    world.changed(PodSource::File).await;
    if !back {
        return;
    }
    if world.chance.random_bool(0.6) {
        let pause = ms(world.chance.random_range(0..3000));
        tokio::time::sleep(pause).await;
    }
    world.note(format!("+ static {} again", pod.uid()));
    world.returned.insert(pod.uid().clone());
    world.files.insert(name, pod);
    world.changed(PodSource::File).await;
}

fn draw_api(world: &mut RunState, passes: impl Fn(&Pod) -> bool) -> Option<Arc<Pod>> {
    world.api.values().filter(|pod| passes(pod)).choose(&mut world.chance).cloned()
}

async fn delete(world: &mut RunState) {
    let Some(pod) = draw_api(world, |pod| !pod.is_deleting()) else { return };
    let own = pod.spec().termination_grace_period_seconds.unwrap_or(30);
    let grace = if world.chance.random_bool(0.7) { own } else { world.chance.random_range(1..=own) };
    request_deletion(world, &pod, grace).await;
}

async fn shorten(world: &mut RunState) {
    let Some(pod) = draw_api(world, Pod::is_deleting) else { return };
    request_deletion(world, &pod, 1).await;
}

async fn request_deletion(world: &mut RunState, pod: &Arc<Pod>, grace: i64) {
    world.note(format!("delete api {} within {grace} s", pod.uid()));
    let mut object = pod.to_object();
    object.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).ok();
    object.metadata.deletion_grace_period_seconds = Some(grace);
    world.api.insert(pod.uid().clone(), Arc::new(Pod::new(object).expect("complete")));
    world.changed(PodSource::Api).await;
}

async fn force(world: &mut RunState) {
    let Some(pod) = draw_api(world, |_| true) else { return };
    world.note(format!("- api {} by force", pod.uid()));
    world.api.remove(pod.uid());
    world.changed(PodSource::Api).await;
}

async fn change_image(world: &mut RunState) {
    let always = |pod: &Pod| !pod.is_deleting() && pod.spec().restart_policy.as_deref() == Some("Always");
    let Some(pod) = draw_api(world, always) else { return };
    let mut spec = pod.spec().clone();
    let Some(container) = spec.containers.first_mut() else { return };
    let image = if container.image.as_deref() == Some("busybox:1") { "busybox:2" } else { "busybox:1" };
    container.image = Some(image.to_owned());
    world.note(format!("~ api {} runs {image}", pod.uid()));
    world.api.insert(pod.uid().clone(), Arc::new(pod.with_spec(spec)));
    world.changed(PodSource::Api).await;
}

fn summary(pod: &Pod) -> String {
    let name = |c: &berth_types::api::Container| match (&c.restart_policy, c.restart_policy_rules.as_deref()) {
        (Some(own), Some([rule, ..])) => format!("{} ({own}, {})", c.name, rule.action),
        (Some(own), _) => format!("{} ({own})", c.name),
        (None, _) => c.name.clone(),
    };
    let names = |list: &[berth_types::api::Container]| list.iter().map(name).collect::<Vec<_>>().join(" ");
    let spec = pod.spec();
    format!(
        "{} grace {} init [{}] containers [{}]",
        spec.restart_policy.as_deref().unwrap_or_default(),
        spec.termination_grace_period_seconds.unwrap_or_default(),
        names(pod.init_containers()),
        names(pod.containers())
    )
}

fn draw_pod(world: &mut RunState, name: &str, source: &str) -> Arc<Pod> {
    world.next += 1;
    let uid = format!("uid-{name}-{}", world.next);
    let policy = ["Always", "Always", "Always", "OnFailure", "Never"].choose(&mut world.chance).expect("policies");
    let grace = *[1, 2, 2, 5, 30].choose(&mut world.chance).expect("graces");
    world.accounts.grace = world.accounts.grace.max(Duration::from_secs(grace));
    let (mut init, mut regular): (Vec<Value>, Vec<Value>) = (Vec::new(), Vec::new());
    for i in 0..[0, 0, 0, 1, 1, 2].choose(&mut world.chance).copied().unwrap_or_default() {
        init.push(container(world, name, &format!("i{i}"), Kind::Init));
    }
    if world.chance.random_bool(0.2) {
        let mut sidecar = container(world, name, "s", Kind::Forever);
        sidecar["restartPolicy"] = "Always".into();
        init.insert(world.chance.random_range(0..=init.len()), sidecar);
    }
    for i in 0..[1, 1, 1, 2, 3].choose(&mut world.chance).copied().unwrap_or_default() {
        let own = draw_own_policy(world);
        let kind = match own.unwrap_or(policy) {
            "Always" => Kind::Forever,
            "OnFailure" => Kind::Once(false),
            _ => Kind::Once(true),
        };
        let mut container = container(world, name, &format!("c{i}"), kind);
        if let Some(own) = own {
            let action = *["Restart", "RestartAllContainers"].choose(&mut world.chance).expect("actions");
            let codes = json!({"operator": "In", "values": [RULED]});
            container["restartPolicy"] = own.into();
            container["restartPolicyRules"] = json!([{"action": action, "exitCodes": codes}]);
        }
        regular.push(container);
    }
    let metadata = json!({
        "uid": uid,
        "annotations": {"kubernetes.io/config.source": source, "kubernetes.io/config.hash": uid},
    });
    let spec = json!({
        "restartPolicy": policy,
        "terminationGracePeriodSeconds": grace,
        "initContainers": init,
        "containers": regular,
    });
    pods::pod_with(name, metadata, spec)
}

/// The exit code that restart rules match.
const RULED: i32 = 42;

/// Some containers have their own restart policy, with a rule.
fn draw_own_policy(world: &mut RunState) -> Option<&'static str> {
    let has = world.profile.has(FaultKind::Rules) && world.chance.random_bool(0.5);
    has.then(|| *["Always", "OnFailure", "Never"].choose(&mut world.chance).expect("policies"))
}

/// Final behavior of a container.
#[derive(Clone, Copy)]
enum Kind {
    /// Exits with 0.
    Init,
    /// Runs forever.
    Forever,
    /// Runs forever or exits; with an error if the flag is set.
    Once(bool),
}

fn container(world: &mut RunState, pod: &str, name: &str, kind: Kind) -> Value {
    let behaviours = draw_behaviours(world, kind);
    world.machine.cri.behave(&format!("{pod}/{name}"), behaviours);
    let image = if world.chance.random_bool(0.2) {
        format!("absent{}:1", world.chance.random_range(0..3))
    } else {
        "busybox:1".to_owned()
    };
    json!({"name": name, "image": image})
}

fn draw_behaviours(world: &mut RunState, kind: Kind) -> Vec<Behaviour> {
    let mut list = Vec::new();
    if world.profile.has(FaultKind::Crashes) {
        for _ in 0..world.chance.random_range(0..3) {
            let after = ms(world.chance.random_range(0..3000));
            list.push(match world.chance.random_range(0..4) {
                0 => Behaviour { start_error: Some("no such file".to_owned()), ..Behaviour::default() },
                1 if !matches!(kind, Kind::Init) => Behaviour::exits(0, after),
                _ => Behaviour::exits(1, after),
            });
        }
    }
    if world.profile.has(FaultKind::Rules) {
        for _ in 0..world.chance.random_range(0..2) {
            let after = ms(world.chance.random_range(0..3000));
            list.insert(world.chance.random_range(0..=list.len()), Behaviour::exits(RULED, after));
        }
    }
    let mut last = match kind {
        Kind::Init => Behaviour::exits(0, ms(world.chance.random_range(0..1000))),
        Kind::Once(may_fail) if world.chance.random_bool(0.5) => {
            let code = i32::from(may_fail && world.chance.random_bool(0.5));
            Behaviour::exits(code, ms(world.chance.random_range(0..1000)))
        }
        Kind::Forever | Kind::Once(_) => Behaviour::default(),
    };
    if world.profile.has(FaultKind::Stubborn) {
        last.stops_after = match world.chance.random_range(0..3) {
            0 => None,
            1 => Some(ms(world.chance.random_range(100..3000))),
            _ => last.stops_after,
        };
    }
    list.push(last);
    list
}

/// Gives every container its final behavior.
pub fn last_behaviours(world: &mut RunState) {
    let last = |list: &mut Vec<Behaviour>| {
        if let Some(last) = list.pop() {
            *list = vec![last];
        }
    };
    world.machine.cri.each_behaviour(last);
}

/// One fault of a kind in the profile.
async fn trouble(world: &mut RunState) {
    let kinds: &[(FaultKind, u32)] = &[
        (FaultKind::Crashes, 3),
        (FaultKind::SandboxesDie, 2),
        (FaultKind::Errors, 4),
        (FaultKind::LostAnswers, 3),
        (FaultKind::Hangs, 2),
        (FaultKind::Delays, 3),
        (FaultKind::Events, 1),
        (FaultKind::Streams, 2),
        (FaultKind::NotReady, 2),
        (FaultKind::AgentKilled, 3),
        (FaultKind::AgentStopped, 1),
        (FaultKind::RuntimeRestarts, 1),
        (FaultKind::Reboots, 1),
        (FaultKind::Victim, 2),
        (FaultKind::Pulls, 1),
        (FaultKind::Disk, 2),
        (FaultKind::ClockSet, 2),
    ];
    let known: Vec<_> = kinds.iter().filter(|(kind, _)| world.profile.has(*kind)).collect();
    let Ok((kind, _)) = known.choose_weighted(&mut world.chance, |(_, weight)| *weight) else { return };
    match kind {
        FaultKind::Crashes => kill_container(world),
        FaultKind::SandboxesDie => kill_sandbox(world),
        FaultKind::AgentKilled if world.chance.random_bool(0.5) => set_fuse(world),
        FaultKind::AgentKilled => world.down(true).await,
        FaultKind::AgentStopped => world.down(false).await,
        FaultKind::Reboots => {
            world.down(true).await;
            world.note("reboot".to_owned());
            world.machine.cri.reboot();
            world.machine.disk.reboot();
        }
        FaultKind::RuntimeRestarts => {
            world.note("the runtime restarts".to_owned());
            world.machine.cri.restart();
        }
        FaultKind::Streams => {
            world.note("streams break".to_owned());
            world.machine.cri.break_streams();
        }
        FaultKind::NotReady => {
            let (runtime, network) = (world.chance.random_bool(0.6), world.chance.random_bool(0.6));
            world.note(format!("runtime ready {runtime}, network ready {network}"));
            world.machine.cri.set_conditions(runtime, network);
        }
        FaultKind::Events => {
            let mut odds = || world.chance.random_range(0.0..0.5);
            let faults = EventFaults { lose: odds(), duplicate: odds(), reorder: odds() };
            world.note(format!("{faults:?}"));
            world.machine.cri.event_faults(faults);
        }
        FaultKind::Victim => strike(world),
        FaultKind::Disk => break_disk(world),
        FaultKind::ClockSet => set_clock(world),
        FaultKind::Pulls => refuse_pulls(world),
        _ => refuse_calls(world, *kind),
    }
}

/// Arms the fuse: the agent is killed at one of its next calls and writes.
fn set_fuse(world: &mut RunState) {
    let calls = world.chance.random_range(0..30);
    let fuse = if world.chance.random_bool(0.5) { KillPoint::Before(calls) } else { KillPoint::After(calls) };
    if let Some(agent) = &world.agent {
        agent.set_kill_point(Some(fuse));
        world.note(format!("agent is to be killed: {fuse:?}"));
    }
}

/// Makes volumes of one pod unmountable, volumes slow, or state files unwritable; or repairs everything.
fn break_disk(world: &mut RunState) {
    let names: Vec<String> = world.wanted().map(|pod| pod.name().to_owned()).collect();
    match (world.chance.random_range(0..5), names.choose(&mut world.chance)) {
        (0, Some(name)) => {
            world.note(format!("volumes of {name} cannot be mounted"));
            world.machine.disk.refuse_mounts(name);
        }
        (1, _) => {
            world.note("state files cannot be written".to_owned());
            world.machine.refuse_writes(true);
        }
        (2 | 3, _) => {
            let pace = ms(world.chance.random_range(0..3000));
            world.note(format!("volumes take {pace:?}"));
            world.machine.disk.set_pace(pace);
        }
        _ => {
            world.note("disk mended".to_owned());
            world.machine.clear_disk_faults();
        }
    }
}

/// Changes the wall clock, by a little or by much.
fn set_clock(world: &mut RunState) {
    let most = *[2_000, 60_000, 7_200_000].choose(&mut world.chance).expect("sizes");
    let by = world.chance.random_range(-most..=most);
    world.note(format!("the clock is set by {by} ms"));
    world.machine.clock.set(by);
}

fn kill_container(world: &mut RunState) {
    let containers = world.machine.cri.containers();
    let Some(container) = containers.choose(&mut world.chance) else { return };
    let code = *[0, 1, 137].choose(&mut world.chance).expect("codes");
    let (id, reason) = (container.id.clone(), if code == 137 { "OOMKilled" } else { "" });
    world.note(format!("container {id} is killed: {code}"));
    world.machine.cri.kill(&id, code, reason);
}

fn kill_sandbox(world: &mut RunState) {
    let sandboxes = world.machine.cri.sandboxes();
    let Some(sandbox) = sandboxes.choose(&mut world.chance) else { return };
    world.note(format!("sandbox {} dies", sandbox.id));
    world.machine.cri.kill_sandbox(&sandbox.id);
}

/// Chooses one pod whose calls never return.
fn strike(world: &mut RunState) {
    if world.victim.is_some() {
        return;
    }
    let names: Vec<String> = world.wanted().map(|pod| pod.name().to_owned()).collect();
    let Some(name) = names.choose(&mut world.chance).cloned() else { return };
    world.note(format!("nothing about {name} is answered any more"));
    for operation in OPERATIONS {
        world.machine.cri.fault(operation, &name, Fault::Hang, None);
    }
    world.victim = Some(name);
}

fn refuse_pulls(world: &mut RunState) {
    if world.accounts.pulls < 2 {
        world.accounts.pulls += 1;
        world.note("a pull fails".to_owned());
        let fault = Fault::Error(Code::Unknown, "no such host".to_owned());
        world.machine.cri.fault("pull_image", "absent", fault, Some(1));
    }
}

fn refuse_calls(world: &mut RunState, kind: FaultKind) {
    let operation = *OPERATIONS.choose(&mut world.chance).expect("operations");
    let codes = [Code::Unknown, Code::Unavailable, Code::Internal, Code::DeadlineExceeded];
    let code = *codes.choose(&mut world.chance).expect("codes");
    let pods: Vec<PodUid> = world.wanted().map(|pod| pod.uid().clone()).collect();
    let target = match pods.choose(&mut world.chance) {
        Some(uid) if world.chance.random_bool(0.4) => uid.as_str().split('-').nth(1).unwrap_or_default().to_owned(),
        _ => String::new(),
    };
    let fault = match kind {
        FaultKind::Errors => Fault::Error(code, "scripted".to_owned()),
        FaultKind::LostAnswers => Fault::ErrorAfter(code, "scripted".to_owned()),
        FaultKind::Hangs => Fault::Hang,
        _ if world.chance.random_bool(0.1) => Fault::Delay(Duration::from_secs(130)),
        _ => Fault::Delay(ms(world.chance.random_range(50..5000))),
    };
    let is_create = ["run_podsandbox", "create_container"].contains(&operation);
    let may_be_lost = match &fault {
        Fault::Error(code, _) | Fault::ErrorAfter(code, _) => *code == Code::DeadlineExceeded,
        Fault::Hang | Fault::Blocked(_) => true,
        Fault::Delay(time) => *time > Duration::from_secs(120),
    };
    world.accounts.doubt |= is_create && may_be_lost;
    // Sometimes without limit until healing: a retry without a pause shows in the number of calls.
    let times = if world.chance.random_bool(0.1) { u32::MAX } else { world.chance.random_range(1..4) };
    world.note(format!("{operation} of {target:?}: {fault:?}, {times} times"));
    world.machine.cri.fault(operation, &target, fault, Some(times));
}
