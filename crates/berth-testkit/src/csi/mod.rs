//! Fake CSI driver with real bind mounts and fault injection.
//!
//! Volumes are directories. The driver fails, hangs, or dies on demand. Its mounts are real mounts of the machine.

mod node;
mod registration;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde_json::Value;
use tokio::{
    net::UnixListener,
    runtime::{self, Runtime},
    sync::watch,
};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Code, Status, transport::Server};

use berth_proto::csi::{
    identity_server::IdentityServer, node_server::NodeServer, node_service_capability::rpc::Type as Capability,
};

pub use registration::{Plugin, RegistrationBehavior, RegistrationCall};

/// Recorded call, in order of arrival.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// Method name: `NodeStageVolume`.
    pub method: &'static str,
    /// Volume ID; empty for calls that concern no volume.
    pub volume: String,
    /// Target path or staging directory.
    pub path: PathBuf,
    /// Other request fields, as far as tests need them.
    pub rest: Value,
    /// Whether the call succeeded; `None` while it is pending.
    pub ok: Option<bool>,
}

/// Fault of a call.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Returns this error without doing anything.
    Refuse(Code, &'static str),
    /// Carries out the call, but returns this error.
    ErrorAfter(Code, &'static str),
    /// Returns success without doing anything. Only for calls whose response is empty.
    SucceedWithoutEffect,
    /// Waits for [`CsiDriver::release`], then carries out the call.
    Hang,
    /// Carries out the call, then simulates the death of the driver process: the connection is lost.
    DieAfter,
}

/// Identity, topology, capacity, and capabilities that the fake CSI driver reports; changeable while it runs.
#[derive(Clone, Debug)]
pub struct DriverProperties {
    /// Driver name.
    pub name: String,
    /// Node ID that it reports.
    pub node_id: String,
    /// Topology segments of the node.
    pub topology: BTreeMap<String, String>,
    /// Maximum number of volumes on the node; 0 is unlimited.
    pub max_volumes: i64,
    /// Node service capabilities.
    pub capabilities: Vec<Capability>,
    /// Volume condition: whether volumes are abnormal, and the message.
    pub condition: Option<(bool, String)>,
}

impl DriverProperties {
    /// Driver that supports staging, volume statistics, and expansion.
    pub fn of(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            node_id: format!("{name}-node"),
            topology: BTreeMap::new(),
            max_volumes: 0,
            capabilities: vec![Capability::StageUnstageVolume, Capability::GetVolumeStats, Capability::ExpandVolume],
            condition: None,
        }
    }
}

#[derive(Default)]
struct DriverState {
    calls: Vec<Call>,
    faults: Vec<(&'static str, usize, Fault)>,
    sizes: BTreeMap<String, i64>,
}

/// State that both gRPC services share.
struct DriverContext {
    nature: Mutex<DriverProperties>,
    state: Mutex<DriverState>,
    changed: watch::Sender<u64>,
    release: watch::Sender<u64>,
    data: PathBuf,
    dies: watch::Sender<u64>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn end(serving: &Mutex<Option<Runtime>>) {
    if let Some(runtime) = lock(serving).take() {
        runtime.shutdown_background();
    }
}

/// Running CSI driver.
pub struct CsiDriver {
    shared: Arc<DriverContext>,
    /// Path of its socket.
    pub endpoint: PathBuf,
    serving: Arc<Mutex<Option<Runtime>>>,
}

impl CsiDriver {
    /// Starts a driver that serves on `<root>/plugins/<name>/csi.sock` and keeps its volumes in `data`.
    pub async fn start(nature: DriverProperties, root: &Path, data: &Path) -> Self {
        let directory = root.join("plugins").join(&nature.name);
        fs::create_dir_all(&directory).expect("failed to create directory");
        fs::create_dir_all(data).expect("failed to create directory");
        let shared = Arc::new(DriverContext {
            nature: Mutex::new(nature),
            state: Mutex::default(),
            changed: watch::Sender::new(0),
            release: watch::Sender::new(0),
            data: data.to_owned(),
            dies: watch::Sender::new(0),
        });
        let mut driver = Self { shared, endpoint: directory.join("csi.sock"), serving: Arc::default() };
        driver.serve().await;
        driver
    }

    /// Serves on a new socket, in a tokio runtime of its own: its shutdown loses connections as the end of a process
    /// does.
    pub async fn serve(&mut self) {
        let _ = fs::remove_file(&self.endpoint); // there is none at first
        let listener = std::os::unix::net::UnixListener::bind(&self.endpoint).expect("failed to listen on the socket");
        listener.set_nonblocking(true).expect("failed to listen on the socket");
        let runtime = runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("failed to build the tokio runtime");
        let shared = self.shared.clone();
        runtime.spawn(async move {
            let listener = UnixListener::from_std(listener).expect("failed to listen on the socket");
            Server::builder()
                .add_service(NodeServer::from_arc(shared.clone()))
                .add_service(IdentityServer::from_arc(shared))
                .serve_with_incoming(UnixListenerStream::new(listener))
                .await
                .expect("served");
        });
        *lock(&self.serving) = Some(runtime);
        let (serving, mut dies) = (self.serving.clone(), self.shared.dies.subscribe());
        dies.mark_unchanged();
        tokio::spawn(async move {
            if dies.changed().await.is_ok() {
                end(&serving);
            }
        });
    }

    /// Stops serving, as if the process had died.
    pub async fn die(&mut self) {
        end(&self.serving);
    }

    /// Changes the driver's properties.
    pub fn nature(&self, change: impl FnOnce(&mut DriverProperties)) {
        change(&mut lock(&self.shared.nature));
    }

    /// Driver name.
    pub fn name(&self) -> String {
        lock(&self.shared.nature).name.clone()
    }

    /// Injects a fault into the next `times` calls of that method.
    pub fn fail(&self, method: &'static str, times: usize, fault: Fault) {
        lock(&self.shared.state).faults.push((method, times, fault));
    }

    /// Removes all faults and releases hanging calls.
    pub fn heal(&self) {
        lock(&self.shared.state).faults.clear();
        self.release();
    }

    /// Releases hanging calls.
    pub fn release(&self) {
        self.shared.release.send_modify(|times| *times += 1);
    }

    /// All recorded calls.
    pub fn calls(&self) -> Vec<Call> {
        lock(&self.shared.state).calls.clone()
    }

    /// Method names of the recorded calls, without `NodeGet…`.
    pub fn mutating_calls(&self) -> Vec<&'static str> {
        let is_act = |call: &&Call| !call.method.starts_with("NodeGet");
        self.calls().iter().filter(is_act).map(|call| call.method).collect()
    }

    /// Recorded calls of one method.
    pub fn of(&self, method: &str) -> Vec<Call> {
        self.calls().into_iter().filter(|call| call.method == method).collect()
    }

    /// Waits until `holds` returns true; evaluates it after each call.
    ///
    /// # Panics
    /// The condition is not met within 60 seconds.
    pub async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let mut moved = self.shared.changed.subscribe();
        let waiting = async {
            while !holds(self) {
                moved.changed().await.expect("the CSI driver has ended");
            }
        };
        let limit = Duration::from_secs(60);
        if tokio::time::timeout(limit, waiting).await.is_err() {
            panic!("timed out after {limit:?} waiting for: {what}; calls: {:#?}", self.calls());
        }
    }

    /// Directory of a volume; created if missing.
    pub fn volume(&self, id: &str) -> PathBuf {
        self.shared.volume(id)
    }

    /// Size in bytes that a volume was expanded to.
    pub fn size(&self, id: &str) -> Option<i64> {
        lock(&self.shared.state).sizes.get(id).copied()
    }
}

impl Drop for CsiDriver {
    fn drop(&mut self) {
        end(&self.serving);
    }
}

impl DriverContext {
    fn volume(&self, id: &str) -> PathBuf {
        let path = self.data.join(id);
        fs::create_dir_all(&path).expect("failed to create the volume directory");
        path
    }

    fn fault(&self, method: &str) -> Option<Fault> {
        let mut state = lock(&self.state);
        let at = state.faults.iter().position(|(of, times, _)| *of == method && *times > 0)?;
        let (_, times, fault) = &mut state.faults[at];
        *times -= 1;
        Some(fault.clone())
    }

    /// Records a call, applies its fault, and runs `work`.
    async fn act<T: Default>(
        &self,
        call: Call,
        work: impl FnOnce() -> Result<T, Status>,
    ) -> Result<tonic::Response<T>, Status> {
        let method = call.method;
        // Subscribes first: a test that observes the call may release it at once.
        let mut release = self.release.subscribe();
        release.mark_unchanged();
        let index = {
            let mut state = lock(&self.state);
            state.calls.push(call);
            state.calls.len() - 1
        };
        self.notify();
        let fault = self.fault(method);
        let done = match fault {
            None => work(),
            Some(Fault::Refuse(code, text)) => Err(Status::new(code, text)),
            Some(Fault::ErrorAfter(code, text)) => work().and(Err(Status::new(code, text))),
            Some(Fault::SucceedWithoutEffect) => Ok(T::default()),
            Some(Fault::Hang) => {
                release.changed().await.expect("the CSI driver has ended");
                work()
            }
            Some(Fault::DieAfter) => {
                let done = work();
                self.dies.send_modify(|times| *times += 1);
                done.and(std::future::pending().await)
            }
        };
        lock(&self.state).calls[index].ok = Some(done.is_ok());
        self.notify();
        done.map(tonic::Response::new)
    }

    fn notify(&self) {
        self.changed.send_modify(|times| *times += 1);
    }
}

/// Mount points at or below a path.
pub fn mounts_below(path: &Path) -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("failed to read the mount table");
    let places = table.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    places.filter(|place| place.starts_with(path)).collect()
}
