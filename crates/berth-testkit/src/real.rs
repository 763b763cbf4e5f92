//! Runtime of the test program `real`: a private containerd, or the embedded runtime.
//!
//! The same program runs once for each; the environment variable [`RUNTIME`] selects the runtime.

use std::{collections::HashMap, path::Path, thread};

use berth_cri::{CriConfig, connect};
use berth_metrics::Registry;
use berth_proto::cri::{self, runtime_service_client::RuntimeServiceClient};
use tonic::transport::Channel;

use super::{
    containerd::{self, Containerd},
    embedded::{self, EmbeddedFixture},
    image::Image,
    process::{Home, PATIENCE},
};

/// Environment variable that selects the runtime: `containerd` (the default) or `embedded`.
pub const RUNTIME: &str = "BERTH_TEST_RUNTIME";
/// Label that CRI objects of a pod have.
const POD_UID: &str = "io.kubernetes.pod.uid";

/// Real container runtime.
pub enum Real {
    /// Separate process.
    Containerd(Containerd),
    /// Inside the agent.
    Embedded(EmbeddedFixture),
}

/// Sandbox or container of the runtime.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuntimeObject {
    /// CRI ID.
    pub id: String,
    /// Whether the container runs, or the sandbox is ready.
    pub is_up: bool,
}

/// Whether the pods of this run use the embedded runtime.
///
/// # Panics
/// [`RUNTIME`] names another runtime.
pub fn is_embedded() -> bool {
    match std::env::var(RUNTIME).as_deref() {
        Err(_) | Ok("" | "containerd") => false,
        Ok("embedded") => true,
        Ok(other) => panic!("{RUNTIME} is {other:?}: expected containerd or embedded"),
    }
}

/// Whether a test is specific to containerd and does not apply to this run; prints a message then.
pub fn is_about_containerd(test: &str) -> bool {
    if is_embedded() {
        println!("not for the embedded runtime: {test}: it tests containerd");
    }
    is_embedded()
}

/// Starts the runtime; prints the test's name and returns `None` if this machine cannot run it.
pub fn start_or_skip(test: &str) -> Option<Real> {
    if is_embedded() {
        return (!embedded::skips(test)).then(|| Real::Embedded(EmbeddedFixture::new()));
    }
    containerd::start_or_skip(test).map(Real::Containerd)
}

impl Real {
    /// Creates a home for an agent on this runtime.
    pub fn home(&self) -> Home {
        match self {
            Self::Containerd(containerd) => Home::new(&containerd.endpoint()),
            Self::Embedded(embedded) => {
                let settings = std::fs::read(embedded.settings()).expect("readable settings");
                Home::new("embedded").settings(serde_json::from_slice(&settings).expect("settings in JSON"))
            }
        }
    }

    /// Temporary directory, removed on drop.
    pub fn dir(&self) -> &Path {
        match self {
            Self::Containerd(containerd) => containerd.dir(),
            Self::Embedded(embedded) => embedded.dir(),
        }
    }

    /// Imports images; the import may be asynchronous.
    pub fn import(&self, name: &str, images: &[Image<'_>]) {
        match self {
            Self::Containerd(containerd) => containerd.import(images),
            Self::Embedded(embedded) => embedded.import(name, images),
        }
    }

    /// The containerd, for tests specific to it.
    ///
    /// # Panics
    /// The runtime is the embedded one.
    pub fn containerd(&mut self) -> &mut Containerd {
        match self {
            Self::Containerd(containerd) => containerd,
            Self::Embedded(_) => panic!("the test requires containerd"),
        }
    }

    /// Sandboxes of a pod, by its UID.
    pub fn sandboxes(&self, uid: &str) -> Vec<RuntimeObject> {
        let filter = cri::PodSandboxFilter { label_selector: labels(uid), ..Default::default() };
        self.ask(move |mut cri| async move {
            let asked = cri::ListPodSandboxRequest { filter: Some(filter) };
            let items = cri.list_pod_sandbox(asked).await.expect("list request failed").into_inner().items;
            let is_up = |state| state == cri::PodSandboxState::SandboxReady as i32;
            items.into_iter().map(|item| RuntimeObject { is_up: is_up(item.state), id: item.id }).collect()
        })
    }

    /// Containers of a pod, by its UID.
    pub fn containers(&self, uid: &str) -> Vec<RuntimeObject> {
        let filter = cri::ContainerFilter { label_selector: labels(uid), ..Default::default() };
        self.ask(move |mut cri| async move {
            let asked = cri::ListContainersRequest { filter: Some(filter) };
            let items = cri.list_containers(asked).await.expect("list request failed").into_inner().containers;
            let is_up = |state| state == cri::ContainerState::ContainerRunning as i32;
            items.into_iter().map(|item| RuntimeObject { is_up: is_up(item.state), id: item.id }).collect()
        })
    }

    /// IDs of all sandboxes and containers.
    pub fn all(&self) -> Vec<String> {
        self.ask(|mut cri| async move {
            let sandboxes =
                cri.list_pod_sandbox(cri::ListPodSandboxRequest::default()).await.expect("list request failed");
            let containers =
                cri.list_containers(cri::ListContainersRequest::default()).await.expect("list request failed");
            let sandboxes = sandboxes.into_inner().items.into_iter().map(|sandbox| sandbox.id);
            sandboxes.chain(containers.into_inner().containers.into_iter().map(|container| container.id)).collect()
        })
    }

    /// Whether pods can have user namespaces of their own (`hostUsers: false`).
    pub fn has_user_namespaces(&self) -> bool {
        self.ask(|mut cri| async move {
            let status = cri.status(cri::StatusRequest::default()).await.expect("status request failed").into_inner();
            let mut features = status.runtime_handlers.iter().filter_map(|handler| handler.features.as_ref());
            features.any(|features| features.user_namespaces)
        })
    }

    /// PID of a running container.
    pub fn pid(&self, container: &str) -> u32 {
        let container_id = container.to_owned();
        let info = self.ask(move |mut cri| async move {
            let asked = cri::ContainerStatusRequest { container_id, verbose: true };
            cri.container_status(asked).await.expect("status request failed").into_inner().info
        });
        pid(&info).unwrap_or_else(|| panic!("container {container} is not running: {info:?}"))
    }

    /// PID of the process whose exit ends the sandbox: pause container or shim.
    pub fn sandbox_pid(&self, sandbox: &str) -> u32 {
        if let Self::Embedded(embedded) = self {
            return embedded.shim(sandbox);
        }
        let pod_sandbox_id = sandbox.to_owned();
        let info = self.ask(move |mut cri| async move {
            let asked = cri::PodSandboxStatusRequest { pod_sandbox_id, verbose: true };
            cri.pod_sandbox_status(asked).await.expect("status request failed").into_inner().info
        });
        pid(&info).unwrap_or_else(|| panic!("sandbox {sandbox} is not running: {info:?}"))
    }

    /// Calls the runtime's socket from a separate thread, so that any context may call it.
    fn ask<T, F>(&self, question: impl FnOnce(RuntimeServiceClient<Channel>) -> F + Send + 'static) -> T
    where
        T: Send + 'static,
        F: Future<Output = T>,
    {
        let endpoint = match self {
            Self::Containerd(containerd) => containerd.endpoint(),
            Self::Embedded(embedded) => embedded.endpoint(),
        };
        let config =
            CriConfig { endpoint, image_endpoint: String::new(), request_timeout: PATIENCE, list_streaming: false };
        let asking = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("failed to build the tokio runtime");
            runtime.block_on(async {
                let connection = connect(&config, &Registry::new()).expect("failed to connect to the runtime");
                let client = RuntimeServiceClient::new(connection.runtime_channel());
                tokio::time::timeout(PATIENCE, question(client)).await.expect("timed out waiting for the runtime")
            })
        });
        asking.join().expect("the request thread panicked")
    }
}

fn labels(uid: &str) -> HashMap<String, String> {
    [(POD_UID.to_owned(), uid.to_owned())].into()
}

fn pid(info: &HashMap<String, String>) -> Option<u32> {
    let value: serde_json::Value = serde_json::from_str(info.get("info")?).ok()?;
    value["pid"].as_u64().filter(|pid| *pid > 0).and_then(|pid| u32::try_from(pid).ok())
}
