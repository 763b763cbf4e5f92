//! Scripted CRI service: CRI traits over the state machine, with latencies, faults, and events.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use async_trait::async_trait;
use berth_cri::{CriError, CriResult, ExecOutput, ImageService, RuntimeService};
use berth_ports::Clock;
use berth_proto::cri;
use futures::{StreamExt, stream::BoxStream};
use rand::{Rng, SeedableRng, rngs::SmallRng};
use tokio::{
    sync::{Semaphore, broadcast, watch},
    time::Instant,
};
use tonic::Code;

use super::{
    history::History,
    script::{Behaviour, Call, EventFaults, Fault, Rule, Script},
    state::{Container, Refusal, RuntimeState, not_found},
    streams::{PendingStreams, StreamRequest},
};

/// Deadline of ordinary calls.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);

/// Fake CRI runtime; see the documentation of the module `scripted_cri`.
pub struct ScriptedCri {
    me: Weak<Self>,
    state: Mutex<RuntimeState>,
    script: Mutex<Script>,
    clock: Arc<dyn Clock>,
    events: Mutex<Events>,
    changed: watch::Sender<u64>,
    slots: Semaphore,
    conditions: Mutex<(bool, bool)>,
    restarts: watch::Sender<u64>,
    version: Mutex<String>,
    stream_requests: Mutex<PendingStreams>,
    traceparents: Mutex<BTreeSet<String>>,
}

struct Events {
    sender: Option<broadcast::Sender<Arc<cri::ContainerEventResponse>>>,
    delayed_event: Option<cri::ContainerEventResponse>,
    chance: SmallRng,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn refused((code, message): Refusal) -> CriError {
    CriError::Rpc { code, message }
}

/// Interface for tests.
impl ScriptedCri {
    /// Creates a healthy runtime with the image `busybox:1`, no latencies, and 10,000 concurrent calls.
    pub fn new(clock: Arc<dyn Clock>) -> Arc<Self> {
        Self::with_parallel(clock, 10_000)
    }

    /// Like [`Self::new`], with at most `parallel` concurrent calls among those that have a latency.
    pub fn with_parallel(clock: Arc<dyn Clock>, parallel: usize) -> Arc<Self> {
        let made = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            state: Mutex::default(),
            script: Mutex::default(),
            clock,
            events: Mutex::new(Events {
                sender: Some(broadcast::channel(4096).0),
                delayed_event: None,
                chance: SmallRng::seed_from_u64(1),
            }),
            changed: watch::channel(0).0,
            slots: Semaphore::new(parallel),
            conditions: Mutex::new((true, true)),
            restarts: watch::channel(0).0,
            version: Mutex::new("0.1.0".to_owned()),
            stream_requests: Mutex::default(),
            traceparents: Mutex::default(),
        });
        made.add_image("docker.io/library/busybox:1", 1_000_000);
        made
    }

    /// Records the trace context of a call.
    pub(super) fn record_trace(&self, traceparent: &str) {
        lock(&self.traceparents).insert(traceparent.to_owned());
    }

    /// Values of the header `traceparent` of all calls.
    pub fn traceparents(&self) -> BTreeSet<String> {
        lock(&self.traceparents).clone()
    }

    /// Seeds the random numbers of event faults.
    pub fn seed(&self, seed: u64) {
        lock(&self.events).chance = SmallRng::seed_from_u64(seed);
    }

    /// Adds a ready sandbox with one running container of that ID, without a CRI call.
    pub fn add_running(&self, uid: &str, pod: &str, name: &str, id: &str) {
        let metadata = cri::PodSandboxMetadata {
            name: pod.to_owned(),
            uid: uid.to_owned(),
            namespace: "default".to_owned(),
            attempt: 0,
        };
        let sandbox = cri::PodSandboxConfig { metadata: Some(metadata), ..Default::default() };
        let metadata = cri::ContainerMetadata { name: name.to_owned(), attempt: 0 };
        let container = cri::ContainerConfig { metadata: Some(metadata), ..Default::default() };
        let now = self.now();
        lock(&self.state).add_running(sandbox, container, id, now);
    }

    /// Adds an image; returns its ID.
    pub fn add_image(&self, tag: &str, size: u64) -> String {
        let id = format!("sha256:{:064x}", berth_types::hash::fnv1a_64(tag.as_bytes()));
        let repo = tag.rsplit_once(':').map_or(tag, |(repo, _)| repo);
        let image = cri::Image {
            id: id.clone(),
            repo_tags: vec![tag.to_owned()],
            repo_digests: vec![format!("{repo}@{id}")],
            size,
            uid: Some(cri::Int64Value { value: 0 }),
            ..Default::default()
        };
        lock(&self.state).images.insert(id.clone(), image);
        id
    }

    /// Adds or replaces an image as given.
    pub fn put_image(&self, image: cri::Image) {
        lock(&self.state).images.insert(image.id.clone(), image);
    }

    /// Programs a container, `pod/container` or just `container`: each start consumes one entry of the list; the last
    /// one stays.
    pub fn behave(&self, container: &str, list: impl IntoIterator<Item = Behaviour>) {
        lock(&self.script).behaviour.insert(container.to_owned(), list.into_iter().collect());
    }

    /// Adds a fault for calls of `op` whose target contains `target`.
    pub fn fault(&self, op: &str, target: &str, fault: Fault, times: Option<u32>) {
        lock(&self.script).rules.push(Rule { op: op.to_owned(), target: target.to_owned(), fault, times });
    }

    /// Removes all call and event faults.
    pub fn heal(&self) {
        let mut script = lock(&self.script);
        script.rules.clear();
        script.events = EventFaults::default();
    }

    /// Removes event faults, and all call faults except permanent ones whose target is exactly `target`.
    pub fn heal_except(&self, target: &str) {
        let mut script = lock(&self.script);
        script.rules.retain(|rule| rule.target == target && rule.times.is_none());
        script.events = EventFaults::default();
    }

    /// Changes the programmed behavior of every container.
    pub fn each_behaviour(&self, change: impl Fn(&mut Vec<Behaviour>)) {
        lock(&self.script).behaviour.values_mut().for_each(change);
    }

    /// Sets the ordinary latency of an operation.
    pub fn latency(&self, op: &str, latency: Duration) {
        lock(&self.script).latency.0.insert(op.to_owned(), latency);
    }

    /// Sets the event faults.
    pub fn event_faults(&self, faults: EventFaults) {
        lock(&self.script).events = faults;
    }

    /// Programs the exit code, output, and duration of a command run by `ExecSync`.
    pub fn on_exec(&self, command: &str, code: i32, stdout: &str, stderr: &str, takes: Duration) {
        lock(&self.script).exec.insert(command.to_owned(), (code, stdout.to_owned(), stderr.to_owned(), takes));
    }

    /// Disables the event stream: the call returns `Unimplemented`, as from a runtime without it.
    pub fn without_events(&self) {
        lock(&self.script).no_events = true;
    }

    /// Ends all event streams cleanly; new ones may be opened.
    pub fn break_streams(&self) {
        lock(&self.events).sender = Some(broadcast::channel(4096).0);
    }

    /// Sets the conditions `RuntimeReady` and `NetworkReady`.
    pub fn set_conditions(&self, runtime: bool, network: bool) {
        *lock(&self.conditions) = (runtime, network);
    }

    /// Sets the CRI version that `Version` reports.
    pub fn set_version(&self, version: &str) {
        version.clone_into(&mut lock(&self.version));
    }

    /// All recorded calls, in order.
    pub fn calls(&self) -> Vec<Call> {
        lock(&self.script).calls.clone()
    }

    /// Clears the recorded calls.
    pub fn clear_calls(&self) {
        lock(&self.script).calls.clear();
    }

    /// Restarts the runtime, which ends hanging calls and all streams, and clears calls, history, and log files.
    pub fn forget_past(&self) {
        self.restart();
        lock(&self.script).calls = Vec::new();
        let mut state = lock(&self.state);
        state.history = History::default();
        state.logs.clear();
    }

    /// Attempt in the name of a container's last log file; log files outlive their containers.
    pub fn last_log(&self, uid: &str, container: &str) -> Option<u32> {
        lock(&self.state).logs.get(&(uid.to_owned(), container.to_owned())).copied()
    }

    /// Targets of the calls of one operation, in order.
    pub fn targets(&self, op: &str) -> Vec<String> {
        self.calls().into_iter().filter(|c| c.op == op).map(|c| c.target).collect()
    }

    /// Number of calls of one operation.
    pub fn count(&self, op: &str) -> usize {
        lock(&self.script).calls.iter().filter(|c| c.op == op).count()
    }

    /// Invariant violations so far.
    pub fn violations(&self) -> Vec<String> {
        lock(&self.state).violations.clone()
    }

    /// Statuses of all containers.
    pub fn containers(&self) -> Vec<cri::ContainerStatus> {
        lock(&self.state).containers.values().map(Container::status).collect()
    }

    /// Environment of the running containers named `pod/container`.
    pub fn environment(&self, pod: &str, container: &str) -> Vec<(String, String)> {
        let ids = self.running(pod, container);
        let state = lock(&self.state);
        let running = state.containers.values().filter(|c| ids.contains(&c.id));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        running.flat_map(|c| &c.config.envs).map(|pair| (pair.key.clone(), text(&pair.value))).collect()
    }

    /// Devices of the running containers named `pod/container`.
    pub fn devices(&self, pod: &str, container: &str) -> Vec<cri::Device> {
        let ids = self.running(pod, container);
        let state = lock(&self.state);
        let running = state.containers.values().filter(|c| ids.contains(&c.id));
        running.flat_map(|c| c.config.devices.clone()).collect()
    }

    /// CDI devices of the running containers named `pod/container`, in the order of the create request.
    pub fn cdi_devices(&self, pod: &str, container: &str) -> Vec<String> {
        let ids = self.running(pod, container);
        let state = lock(&self.state);
        let running = state.containers.values().filter(|c| ids.contains(&c.id));
        running.flat_map(|c| c.config.cdi_devices.iter().map(|device| device.name.clone())).collect()
    }

    /// All containers as `ListContainers` would return them (with their sandbox), without a call.
    pub fn listed(&self) -> Vec<cri::Container> {
        lock(&self.state).containers.values().map(Container::listed).collect()
    }

    /// All sandboxes as `ListPodSandbox` would return them.
    pub fn sandboxes(&self) -> Vec<cri::PodSandbox> {
        lock(&self.state).sandboxes.values().map(super::state::Sandbox::listed).collect()
    }

    /// IDs of the running containers named `pod/container`; an empty pod matches any.
    pub fn running(&self, pod: &str, container: &str) -> Vec<String> {
        let state = lock(&self.state);
        let of_pod =
            |c: &Container| pod.is_empty() || state.sandboxes.get(&c.sandbox).is_some_and(|s| s.pod_name() == pod);
        let running = cri::ContainerState::ContainerRunning;
        let found = state.containers.values().filter(|c| c.state == running && c.name() == container && of_pod(c));
        found.map(|c| c.id.clone()).collect()
    }

    /// Ends a container's process, as the kernel or an administrator would.
    pub fn kill(&self, id: &str, code: i32, reason: &str) {
        let now = self.now();
        let died = lock(&self.state).exit(id, code, reason, now);
        if died {
            self.emit(id, cri::ContainerEventType::ContainerStoppedEvent);
        }
    }

    /// Ends a sandbox and its containers.
    pub fn kill_sandbox(&self, id: &str) {
        let now = self.now();
        let died = lock(&self.state).stop_sandbox(id, now);
        for container in died {
            self.emit(&container, cri::ContainerEventType::ContainerStoppedEvent);
        }
        self.emit(id, cri::ContainerEventType::ContainerStoppedEvent);
    }

    /// Restarts the runtime: containers keep running, pending calls are not carried out and return `Unavailable`, and
    /// event streams end.
    pub fn restart(&self) {
        self.restarts.send_modify(|n| *n += 1);
        self.break_streams();
        self.touch();
    }

    /// Everything that happened so far.
    pub fn history(&self) -> History {
        lock(&self.state).history.clone()
    }

    /// Stops all sandboxes and restarts the runtime, as a reboot of the machine does.
    pub fn reboot(&self) {
        let now = self.now();
        let mut state = lock(&self.state);
        let all: Vec<String> = state.sandboxes.keys().cloned().collect();
        for id in all {
            state.stop_sandbox(&id, now);
        }
        drop(state);
        self.restart();
    }

    /// Removes all sandboxes and containers without events or history.
    pub fn forget_objects(&self) {
        let mut state = lock(&self.state);
        state.sandboxes.clear();
        state.containers.clear();
    }

    /// Waits (in tokio's time) until `condition` returns true.
    ///
    /// # Panics
    /// The condition is not met within `limit`.
    pub async fn until(&self, what: &str, limit: Duration, condition: impl Fn(&Self) -> bool) {
        let mut changes = self.changed.subscribe();
        let wait = async {
            while !condition(self) {
                changes.changed().await.expect("the runtime has been dropped");
            }
        };
        if tokio::time::timeout(limit, wait).await.is_err() {
            let (calls, containers) = (self.calls(), self.containers());
            panic!("timed out after {limit:?} waiting for: {what}\ncalls: {calls:#?}\ncontainers: {containers:#?}");
        }
    }

    /// Sets the streaming server's URL without a path, `http://127.0.0.1:1234`. Until it is set, streaming calls
    /// return `Unimplemented`.
    pub fn stream_at(&self, base: impl Into<String>) {
        lock(&self.stream_requests).base = Some(base.into());
    }

    /// Takes the stream request of a path of the streaming server; each path is valid once.
    pub fn take_stream(&self, path: &str) -> Option<StreamRequest> {
        lock(&self.stream_requests).take(path)
    }

    fn offer(&self, request: StreamRequest) -> CriResult<String> {
        request.validate().map_err(refused)?;
        match &request {
            StreamRequest::Exec(r) => lock(&self.state).running(&r.container_id).map_err(refused)?,
            StreamRequest::Attach(r) => lock(&self.state).running(&r.container_id).map_err(refused)?,
            StreamRequest::PortForward(r) => {
                let id = &r.pod_sandbox_id;
                let known = lock(&self.state).sandboxes.contains_key(id);
                known.then_some(()).ok_or_else(|| refused(not_found("sandbox", id)))?;
            }
        }
        lock(&self.stream_requests).add(request).map_err(refused)
    }

    fn now(&self) -> i64 {
        i64::try_from(self.clock.now().as_nanosecond()).expect("in range")
    }

    fn touch(&self) {
        self.changed.send_modify(|n| *n += 1);
    }

    fn emit(&self, id: &str, kind: cri::ContainerEventType) {
        self.publish(self.event(id, kind));
    }

    fn publish(&self, event: cri::ContainerEventResponse) {
        let faults = lock(&self.script).events;
        let mut events = lock(&self.events);
        let lost = events.chance.random_bool(faults.lose);
        let twice = events.chance.random_bool(faults.duplicate);
        let late = events.chance.random_bool(faults.reorder);
        let delayed = events.delayed_event.take();
        let mut out: Vec<cri::ContainerEventResponse> = Vec::new();
        match (lost, late) {
            (true, _) => {}
            (false, true) => events.delayed_event = Some(event),
            (false, false) => out.extend(std::iter::repeat_n(event, if twice { 2 } else { 1 })),
        }
        out.extend(delayed);
        if let Some(sender) = &events.sender {
            for event in out {
                let _ = sender.send(Arc::new(event));
            }
        }
        drop(events);
        self.touch();
    }

    fn event(&self, id: &str, kind: cri::ContainerEventType) -> cri::ContainerEventResponse {
        let state = lock(&self.state);
        let sandbox = state.containers.get(id).map_or(id, |c| c.sandbox.as_str());
        cri::ContainerEventResponse {
            container_id: id.to_owned(),
            container_event_type: kind as i32,
            created_at: self.now(),
            pod_sandbox_status: state.sandboxes.get(sandbox).map(super::state::Sandbox::status),
            containers_statuses: Vec::new(),
        }
    }

    /// Logs a call, applies faults and latency, and runs it within its deadline; a call that exceeds the deadline
    /// continues in the background.
    async fn call<T: Send + 'static>(
        &self,
        op: &'static str,
        target: String,
        detail: String,
        limit: Duration,
        act: impl AsyncAct<T>,
    ) -> CriResult<T> {
        let (fault, latency) = {
            let mut script = lock(&self.script);
            script.calls.push(Call { at: Instant::now(), op, target: target.clone(), detail });
            (script.fault(op, &target), script.latency.0.get(op).copied().unwrap_or_default())
        };
        tracing::debug!(target: "cri", op, of = %target, fault = ?fault, "call");
        self.touch();
        let me = self.me.upgrade().expect("the runtime has been dropped");
        let work = async move {
            match fault {
                Some(Fault::Error(code, message)) => return Err(CriError::Rpc { code, message }),
                Some(Fault::Hang) => std::future::pending::<()>().await,
                Some(Fault::Delay(extra)) => tokio::time::sleep(extra).await,
                Some(Fault::Blocked(go)) => go.cancelled().await,
                Some(Fault::ErrorAfter(code, message)) => {
                    me.paced(latency, act).await?;
                    return Err(CriError::Rpc { code, message });
                }
                None => {}
            }
            me.paced(latency, act).await
        };
        let mut restarts = self.restarts.subscribe();
        let work = async move {
            tokio::select! {
                biased;
                _ = restarts.changed() => {
                    Err(CriError::Rpc { code: Code::Unavailable, message: "the runtime was restarted".to_owned() })
                }
                done = work => done,
            }
        };
        let mut task = tokio::spawn(work);
        match tokio::time::timeout(limit, &mut task).await {
            Ok(done) => done.expect("the scripted runtime panicked"),
            Err(_) => Err(CriError::TimedOut { op, limit }),
        }
    }

    async fn paced<T: Send + 'static>(self: &Arc<Self>, latency: Duration, act: impl AsyncAct<T>) -> CriResult<T> {
        if !latency.is_zero() {
            let _slot = self.slots.acquire().await.expect("the semaphore was closed");
            tokio::time::sleep(latency).await;
        }
        act.act(self.clone()).await
    }

    fn target_of(&self, container: &str) -> String {
        let state = lock(&self.state);
        let Some(found) = state.containers.get(container) else { return container.to_owned() };
        let pod = state.sandboxes.get(&found.sandbox).map_or("", |s| s.pod_name());
        format!("{pod}/{}", found.name())
    }

    fn pod_of(&self, sandbox: &str) -> String {
        lock(&self.state).sandboxes.get(sandbox).map_or(sandbox.to_owned(), |s| s.pod_name().to_owned())
    }

    fn run_program(self: &Arc<Self>, id: &str, behaviour: &Behaviour) {
        let Some(after) = behaviour.exits_after else { return };
        let (me, id, behaviour) = (self.clone(), id.to_owned(), behaviour.clone());
        tokio::spawn(async move {
            tokio::time::sleep(after).await;
            me.kill(&id, behaviour.exit_code, &behaviour.reason);
        });
    }

    fn behaviour_of(&self, id: &str) -> Behaviour {
        let target = self.target_of(id);
        let (pod, container) = target.split_once('/').unwrap_or(("", &target));
        let mut script = lock(&self.script);
        let key = if script.behaviour.contains_key(&target) { target.as_str() } else { container };
        let last = script.behaviour.get(key).and_then(|list| list.last().cloned());
        last.unwrap_or_else(|| script.next_behaviour(pod, container))
    }
}

/// Asynchronous action on the runtime; a trait, because closures that return futures borrowing their argument cannot
/// be named.
pub trait AsyncAct<T>: Send + 'static {
    /// Runs the action.
    fn act(self, cri: Arc<ScriptedCri>) -> futures::future::BoxFuture<'static, CriResult<T>>;
}

impl<T, F, R> AsyncAct<T> for F
where
    F: FnOnce(Arc<ScriptedCri>) -> R + Send + 'static,
    R: Future<Output = CriResult<T>> + Send + 'static,
{
    fn act(self, cri: Arc<ScriptedCri>) -> futures::future::BoxFuture<'static, CriResult<T>> {
        Box::pin(self(cri))
    }
}

fn labels_match(
    selector: &std::collections::HashMap<String, String>,
    labels: &std::collections::HashMap<String, String>,
) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}

#[async_trait]
impl RuntimeService for ScriptedCri {
    async fn version(&self, version: &str) -> CriResult<cri::VersionResponse> {
        self.call("version", version.to_owned(), String::new(), REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            Ok(cri::VersionResponse {
                version: lock(&me.version).clone(),
                runtime_name: "scripted".to_owned(),
                runtime_version: "1.0.0".to_owned(),
                runtime_api_version: "v1".to_owned(),
            })
        })
        .await
    }

    async fn status(&self) -> CriResult<cri::StatusResponse> {
        self.call("status", String::new(), String::new(), REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            let (runtime, network) = *lock(&me.conditions);
            let condition = |kind: &str, status: bool| cri::RuntimeCondition {
                r#type: kind.to_owned(),
                status,
                reason: if status { String::new() } else { "Scripted".to_owned() },
                message: if status { String::new() } else { "not ready".to_owned() },
            };
            let conditions = vec![condition("RuntimeReady", runtime), condition("NetworkReady", network)];
            Ok(cri::StatusResponse { status: Some(cri::RuntimeStatus { conditions }), ..Default::default() })
        })
        .await
    }

    async fn runtime_config(&self) -> CriResult<cri::RuntimeConfigResponse> {
        self.call("runtime_config", String::new(), String::new(), REQUEST_TIMEOUT, |_| async {
            let linux = Some(cri::LinuxRuntimeConfiguration { cgroup_driver: cri::CgroupDriver::Cgroupfs as i32 });
            Ok(cri::RuntimeConfigResponse { linux })
        })
        .await
    }

    async fn update_runtime_config(&self, pod_cidr: &str) -> CriResult<()> {
        let target = pod_cidr.to_owned();
        self.call("update_runtime_config", target, String::new(), REQUEST_TIMEOUT, |_| async { Ok(()) }).await
    }

    async fn run_pod_sandbox(&self, config: cri::PodSandboxConfig, handler: &str) -> CriResult<String> {
        let meta = config.metadata.clone().unwrap_or_default();
        let (target, detail) = (meta.name, meta.attempt.to_string());
        let handler = handler.to_owned();
        self.call("run_podsandbox", target, detail, REQUEST_TIMEOUT * 2, |me: Arc<Self>| async move {
            let now = me.now();
            let id = lock(&me.state).run_sandbox(config, &handler, now).map_err(refused)?;
            me.emit(&id, cri::ContainerEventType::ContainerCreatedEvent);
            me.emit(&id, cri::ContainerEventType::ContainerStartedEvent);
            Ok(id)
        })
        .await
    }

    async fn stop_pod_sandbox(&self, id: &str) -> CriResult<()> {
        let (id, target) = (id.to_owned(), self.pod_of(id));
        self.call("stop_podsandbox", target, id.clone(), REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            let now = me.now();
            let (was_ready, died) = {
                let mut state = lock(&me.state);
                (state.sandboxes.get(&id).is_some_and(|s| s.ready), state.stop_sandbox(&id, now))
            };
            for container in died {
                me.emit(&container, cri::ContainerEventType::ContainerStoppedEvent);
            }
            if was_ready {
                me.emit(&id, cri::ContainerEventType::ContainerStoppedEvent);
            }
            Ok(())
        })
        .await
    }

    async fn remove_pod_sandbox(&self, id: &str) -> CriResult<()> {
        let (id, target) = (id.to_owned(), self.pod_of(id));
        self.call("remove_podsandbox", target, id.clone(), REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            let event = me.event(&id, cri::ContainerEventType::ContainerDeletedEvent);
            let now = me.now();
            lock(&me.state).remove_sandbox(&id, now);
            me.publish(event);
            Ok(())
        })
        .await
    }

    async fn pod_sandbox_status(&self, id: &str) -> CriResult<cri::PodSandboxStatusResponse> {
        let (id, target) = (id.to_owned(), self.pod_of(id));
        self.call("podsandbox_status", target, id.clone(), REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            let state = lock(&me.state);
            let status = state.sandboxes.get(&id).ok_or_else(|| refused(not_found("sandbox", &id)))?.status();
            Ok(cri::PodSandboxStatusResponse { status: Some(status), ..Default::default() })
        })
        .await
    }

    async fn pod_sandbox_info(&self, id: &str) -> CriResult<HashMap<String, String>> {
        let (id, target) = (id.to_owned(), self.pod_of(id));
        self.call("podsandbox_status", target, id.clone(), REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            let state = lock(&me.state);
            state.sandboxes.get(&id).ok_or_else(|| refused(not_found("sandbox", &id)))?;
            Ok(HashMap::from([("info".to_owned(), r#"{"image":"registry.example/pause:1"}"#.to_owned())]))
        })
        .await
    }

    async fn list_pod_sandbox(&self, filter: Option<cri::PodSandboxFilter>) -> CriResult<Vec<cri::PodSandbox>> {
        let filter = filter.unwrap_or_default();
        let target = filter.label_selector.get("io.kubernetes.pod.uid").cloned().unwrap_or_default();
        self.call("list_podsandbox", target, String::new(), REQUEST_TIMEOUT, move |me: Arc<Self>| async move {
            let state = lock(&me.state);
            let listed = state.sandboxes.values().map(super::state::Sandbox::listed);
            Ok(listed
                .filter(|s| filter.id.is_empty() || s.id.starts_with(&filter.id))
                .filter(|s| filter.state.is_none_or(|f| f.state == s.state))
                .filter(|s| labels_match(&filter.label_selector, &s.labels))
                .collect())
        })
        .await
    }

    async fn create_container(
        &self,
        sandbox: &str,
        config: cri::ContainerConfig,
        _sandbox_config: cri::PodSandboxConfig,
    ) -> CriResult<String> {
        let meta = config.metadata.clone().unwrap_or_default();
        let (sandbox, target) = (sandbox.to_owned(), format!("{}/{}", self.pod_of(sandbox), meta.name));
        let detail = meta.attempt.to_string();
        self.call("create_container", target, detail, REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            let now = me.now();
            let id = lock(&me.state).create(&sandbox, config, now).map_err(refused)?;
            me.emit(&id, cri::ContainerEventType::ContainerCreatedEvent);
            Ok(id)
        })
        .await
    }

    async fn start_container(&self, id: &str) -> CriResult<()> {
        let (id, target) = (id.to_owned(), self.target_of(id));
        let named = target.clone();
        self.call("start_container", target, String::new(), REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            let (pod, container) = named.split_once('/').unwrap_or(("", &named));
            let behaviour = lock(&me.script).next_behaviour(pod, container);
            let now = me.now();
            if let Some(text) = &behaviour.start_error {
                lock(&me.state).fail_start(&id, text, now);
                me.emit(&id, cri::ContainerEventType::ContainerStoppedEvent);
                return Err(CriError::Rpc { code: Code::Unknown, message: text.clone() });
            }
            lock(&me.state).start(&id, now).map_err(refused)?;
            me.emit(&id, cri::ContainerEventType::ContainerStartedEvent);
            me.run_program(&id, &behaviour);
            Ok(())
        })
        .await
    }

    async fn stop_container(&self, id: &str, grace: Duration) -> CriResult<()> {
        let (id, target) = (id.to_owned(), self.target_of(id));
        let behaviour = self.behaviour_of(&id);
        let detail = grace.as_secs().to_string();
        self.call("stop_container", target, detail, REQUEST_TIMEOUT + grace, move |me: Arc<Self>| async move {
            let runs = || {
                let running = cri::ContainerState::ContainerRunning;
                lock(&me.state).containers.get(&id).is_some_and(|c| c.state == running)
            };
            if !runs() {
                return Ok(());
            }
            let (wait, code) = match behaviour.stops_after {
                Some(after) if after <= grace && !grace.is_zero() => (after, behaviour.stop_code),
                _ => (grace, 137),
            };
            let mut changes = me.changed.subscribe();
            let gone = async {
                while runs() {
                    if changes.changed().await.is_err() {
                        break;
                    }
                }
            };
            if tokio::time::timeout(wait, gone).await.is_err() {
                me.kill(&id, code, "");
            }
            Ok(())
        })
        .await
    }

    async fn remove_container(&self, id: &str) -> CriResult<()> {
        let (id, target) = (id.to_owned(), self.target_of(id));
        self.call("remove_container", target, id.clone(), REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            let now = me.now();
            let event = me.event(&id, cri::ContainerEventType::ContainerDeletedEvent);
            let known = lock(&me.state).remove(&id, now);
            if known {
                me.publish(event);
            }
            Ok(())
        })
        .await
    }

    async fn list_containers(&self, filter: Option<cri::ContainerFilter>) -> CriResult<Vec<cri::Container>> {
        let filter = filter.unwrap_or_default();
        let target = filter.label_selector.get("io.kubernetes.pod.uid").cloned().unwrap_or_default();
        self.call("list_containers", target, String::new(), REQUEST_TIMEOUT, move |me: Arc<Self>| async move {
            let state = lock(&me.state);
            Ok(state
                .containers
                .values()
                .map(Container::listed)
                .filter(|c| filter.id.is_empty() || c.id.starts_with(&filter.id))
                .filter(|c| filter.pod_sandbox_id.is_empty() || c.pod_sandbox_id == filter.pod_sandbox_id)
                .filter(|c| filter.state.is_none_or(|f| f.state == c.state))
                .filter(|c| labels_match(&filter.label_selector, &c.labels))
                .collect())
        })
        .await
    }

    async fn container_status(&self, id: &str) -> CriResult<cri::ContainerStatus> {
        let (id, target) = (id.to_owned(), self.target_of(id));
        self.call("container_status", target, id.clone(), REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            let state = lock(&me.state);
            let found = state.containers.get(&id).ok_or_else(|| refused(not_found("container", &id)))?;
            Ok(found.status())
        })
        .await
    }

    async fn update_container_resources(&self, id: &str, linux: cri::LinuxContainerResources) -> CriResult<()> {
        let (id, target) = (id.to_owned(), self.target_of(id));
        let detail = format!("{linux:?}");
        self.call("update_container", target, detail, REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            let mut state = lock(&me.state);
            let found = state.containers.get_mut(&id).ok_or_else(|| refused(not_found("container", &id)))?;
            found.config.linux.get_or_insert_default().resources = Some(linux);
            Ok(())
        })
        .await
    }

    async fn update_pod_sandbox_resources(
        &self,
        id: &str,
        _overhead: cri::LinuxContainerResources,
        resources: cri::LinuxContainerResources,
    ) -> CriResult<()> {
        let target = self.pod_of(id);
        let detail = format!("{resources:?}");
        self.call("update_podsandbox_resources", target, detail, REQUEST_TIMEOUT, |_| async { Ok(()) }).await
    }

    async fn list_container_stats(
        &self,
        filter: Option<cri::ContainerStatsFilter>,
    ) -> CriResult<Vec<cri::ContainerStats>> {
        let filter = filter.unwrap_or_default();
        let target = filter.id.clone();
        self.call("list_container_stats", target, String::new(), REQUEST_TIMEOUT, move |me: Arc<Self>| async move {
            let now = me.now();
            let state = lock(&me.state);
            let running = state.containers.values().filter(|c| c.is_running());
            let wanted = running
                .filter(|c| filter.id.is_empty() || c.id.starts_with(&filter.id))
                .filter(|c| filter.pod_sandbox_id.is_empty() || c.sandbox == filter.pod_sandbox_id)
                .filter(|c| labels_match(&filter.label_selector, &c.config.labels));
            Ok(wanted.map(|c| c.stats(now)).collect())
        })
        .await
    }

    async fn list_pod_sandbox_stats(
        &self,
        filter: Option<cri::PodSandboxStatsFilter>,
    ) -> CriResult<Vec<cri::PodSandboxStats>> {
        let filter = filter.unwrap_or_default();
        let target = filter.id.clone();
        self.call("list_podsandbox_stats", target, String::new(), REQUEST_TIMEOUT, move |me: Arc<Self>| async move {
            let now = me.now();
            let state = lock(&me.state);
            let wanted = (state.sandboxes.values().filter(|s| s.ready))
                .filter(|s| filter.id.is_empty() || s.id.starts_with(&filter.id))
                .filter(|s| labels_match(&filter.label_selector, &s.config.labels));
            let containers = |id: &str| {
                let of = state.containers.values().filter(|c| c.sandbox == id && c.is_running());
                of.map(|c| c.stats(now)).collect()
            };
            Ok(wanted.map(|s| s.stats(containers(&s.id))).collect())
        })
        .await
    }

    async fn reopen_container_log(&self, id: &str) -> CriResult<()> {
        let (id, target) = (id.to_owned(), self.target_of(id));
        self.call("reopen_container_log", target, String::new(), REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            let path = {
                let state = lock(&me.state);
                state.containers.get(&id).ok_or_else(|| refused(not_found("container", &id)))?.log_path.clone()
            };
            let opened = std::fs::OpenOptions::new().create(true).append(true).open(path);
            opened.map(drop).map_err(|e| CriError::Rpc { code: Code::Unknown, message: e.to_string() })
        })
        .await
    }

    async fn exec_sync(&self, id: &str, command: &[String], timeout: Duration, _: usize) -> CriResult<ExecOutput> {
        let joined = command.join(" ");
        let detail = joined.clone();
        let limit = if timeout.is_zero() { Duration::from_secs(86_400) } else { REQUEST_TIMEOUT + timeout };
        let target = self.target_of(id);
        self.call("exec_sync", target, detail, limit, move |me: Arc<Self>| async move {
            let scripted = lock(&me.script).exec.get(&joined).cloned();
            let (code, stdout, stderr, takes) = scripted.unwrap_or_default();
            if !timeout.is_zero() && takes > timeout {
                tokio::time::sleep(timeout).await;
                return Err(CriError::ExecTimedOut { command: joined, limit: timeout });
            }
            tokio::time::sleep(takes).await;
            if code == 0 {
                return Ok(ExecOutput { stdout: stdout.into_bytes(), stderr: stderr.into_bytes() });
            }
            Err(CriError::Exit { command: joined, code, stdout, stderr })
        })
        .await
    }

    async fn exec(&self, request: cri::ExecRequest) -> CriResult<String> {
        let target = self.target_of(&request.container_id);
        let detail = request.cmd.join(" ");
        self.call("exec", target, detail, REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            me.offer(StreamRequest::Exec(request))
        })
        .await
    }

    async fn attach(&self, request: cri::AttachRequest) -> CriResult<String> {
        let target = self.target_of(&request.container_id);
        self.call("attach", target, String::new(), REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            me.offer(StreamRequest::Attach(request))
        })
        .await
    }

    async fn port_forward(&self, request: cri::PortForwardRequest) -> CriResult<String> {
        let target = self.pod_of(&request.pod_sandbox_id);
        let detail = format!("{:?}", request.port);
        self.call("port_forward", target, detail, REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            me.offer(StreamRequest::PortForward(request))
        })
        .await
    }

    async fn checkpoint_container(&self, id: &str, location: &str, timeout: Duration) -> CriResult<()> {
        let (id, target, location) = (id.to_owned(), self.target_of(id), location.to_owned());
        let detail = format!("{} {location}", timeout.as_secs());
        let limit = REQUEST_TIMEOUT.max(timeout);
        self.call("checkpoint_container", target, detail, limit, |me: Arc<Self>| async move {
            lock(&me.state).running(&id).map_err(refused)?;
            std::fs::write(&location, b"a checkpoint")
                .map_err(|e| CriError::Rpc { code: Code::Unknown, message: e.to_string() })
        })
        .await
    }

    async fn container_events(&self) -> CriResult<BoxStream<'static, CriResult<cri::ContainerEventResponse>>> {
        let refused = lock(&self.script).no_events;
        let fault = lock(&self.script).fault("get_container_events", "");
        if refused || fault.is_some() {
            let message = "unknown method GetContainerEvents for service runtime.v1.RuntimeService".to_owned();
            return Err(CriError::Rpc { code: Code::Unimplemented, message });
        }
        let receiver = lock(&self.events).sender.as_ref().expect("the event channel was closed").subscribe();
        let stream = futures::stream::unfold(receiver, |mut receiver| async move {
            loop {
                match receiver.recv().await {
                    Ok(event) => return Some((Ok((*event).clone()), receiver)),
                    Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => return None,
                }
            }
        });
        Ok(stream.boxed())
    }
}

#[async_trait]
impl ImageService for ScriptedCri {
    async fn list_images(&self) -> CriResult<Vec<cri::Image>> {
        self.call("list_images", String::new(), String::new(), REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            Ok(lock(&me.state).images.values().cloned().collect())
        })
        .await
    }

    async fn image_status(&self, image: cri::ImageSpec) -> CriResult<Option<cri::Image>> {
        let name = image.image;
        self.call("image_status", name.clone(), String::new(), REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            Ok(lock(&me.state).image(&name).cloned())
        })
        .await
    }

    async fn pull_image(
        &self,
        image: cri::ImageSpec,
        auth: Option<cri::AuthConfig>,
        _sandbox: Option<cri::PodSandboxConfig>,
    ) -> CriResult<String> {
        let name = image.image;
        let user = auth.map(|a| a.username).unwrap_or_default();
        let limit = Duration::from_secs(86_400);
        self.call("pull_image", name.clone(), user, limit, |me: Arc<Self>| async move {
            let present = lock(&me.state).image(&name).map(|i| i.id.clone());
            let full = if name.contains('/') { name } else { format!("docker.io/library/{name}") };
            Ok(present.unwrap_or_else(|| me.add_image(&full, 1_000_000)))
        })
        .await
    }

    async fn remove_image(&self, image: cri::ImageSpec) -> CriResult<()> {
        let name = image.image;
        self.call("remove_image", name.clone(), String::new(), REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            let mut state = lock(&me.state);
            let id = state.image(&name).map(|i| i.id.clone());
            if let Some(id) = id {
                state.images.remove(&id);
            }
            Ok(())
        })
        .await
    }

    async fn image_fs_info(&self) -> CriResult<cri::ImageFsInfoResponse> {
        self.call("image_fs_info", String::new(), String::new(), REQUEST_TIMEOUT, |me: Arc<Self>| async move {
            let used: u64 = lock(&me.state).images.values().map(|i| i.size).sum();
            let usage = cri::FilesystemUsage {
                timestamp: me.now(),
                used_bytes: Some(cri::UInt64Value { value: used }),
                ..Default::default()
            };
            Ok(cri::ImageFsInfoResponse { image_filesystems: vec![usage], ..Default::default() })
        })
        .await
    }
}
