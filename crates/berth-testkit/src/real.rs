//! The runtime that runs the pods of the test program `real`: a private containerd, or the embedded runtime.
//!
//! The same program is run once for each; the variable [`RUNTIME`] says for which.

use std::{collections::HashMap, path::Path, thread};

use berth_cri::{CriConfig, connect};
use berth_metrics::Registry;
use berth_proto::cri::{self, runtime_service_client::RuntimeServiceClient};
use tonic::transport::Channel;

use super::{
    containerd::{self, Containerd},
    embedded::{self, Embedded},
    image::Image,
    process::{Home, PATIENCE},
};

/// The environment variable that names the runtime: `containerd` (the default) or `embedded`.
pub const RUNTIME: &str = "BERTH_TEST_RUNTIME";
/// The label by which the kubelet finds what belongs to a pod.
const POD_UID: &str = "io.kubernetes.pod.uid";

/// A runtime.
pub enum Real {
    /// A process of its own.
    Containerd(Containerd),
    /// Within the agent.
    Embedded(Embedded),
}

/// Something the runtime holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Held {
    /// Its id.
    pub id: String,
    /// Whether it runs, or is ready.
    pub is_up: bool,
}

/// Whether this run's pods run on the embedded runtime.
///
/// # Panics
/// If [`RUNTIME`] names another one.
pub fn is_embedded() -> bool {
    match std::env::var(RUNTIME).as_deref() {
        Err(_) | Ok("" | "containerd") => false,
        Ok("embedded") => true,
        Ok(other) => panic!("{RUNTIME} is {other:?}: expected containerd or embedded"),
    }
}

/// Whether a test is about containerd and says nothing here; tells so.
pub fn is_about_containerd(test: &str) -> bool {
    if is_embedded() {
        println!("not for the embedded runtime: {test}: it is about containerd");
    }
    is_embedded()
}

/// A runtime unless this machine cannot have one; then says so, by the test's name.
pub fn start_or_skip(test: &str) -> Option<Real> {
    if is_embedded() {
        return (!embedded::skips(test)).then(|| Real::Embedded(Embedded::new()));
    }
    containerd::start_or_skip(test).map(Real::Containerd)
}

impl Real {
    /// A home for an agent on it.
    pub fn home(&self) -> Home {
        match self {
            Self::Containerd(containerd) => Home::new(&containerd.endpoint()),
            Self::Embedded(embedded) => {
                Home::new("embedded").environment("BERTH_CONFIG", embedded.settings().display().to_string())
            }
        }
    }

    /// A folder that goes with it.
    pub fn dir(&self) -> &Path {
        match self {
            Self::Containerd(containerd) => containerd.dir(),
            Self::Embedded(embedded) => embedded.dir(),
        }
    }

    /// Imports images; they may take a moment to be there.
    pub fn import(&self, name: &str, images: &[Image<'_>]) {
        match self {
            Self::Containerd(containerd) => containerd.import(images),
            Self::Embedded(embedded) => embedded.import(name, images),
        }
    }

    /// The containerd, for tests that are about it.
    pub fn containerd(&mut self) -> &mut Containerd {
        match self {
            Self::Containerd(containerd) => containerd,
            Self::Embedded(_) => panic!("the test is about containerd"),
        }
    }

    /// Sandboxes of a pod.
    pub fn sandboxes(&self, uid: &str) -> Vec<Held> {
        let filter = cri::PodSandboxFilter { label_selector: labels(uid), ..Default::default() };
        self.ask(move |mut cri| async move {
            let asked = cri::ListPodSandboxRequest { filter: Some(filter) };
            let items = cri.list_pod_sandbox(asked).await.expect("a list").into_inner().items;
            let is_up = |state| state == cri::PodSandboxState::SandboxReady as i32;
            items.into_iter().map(|item| Held { is_up: is_up(item.state), id: item.id }).collect()
        })
    }

    /// Containers of a pod.
    pub fn containers(&self, uid: &str) -> Vec<Held> {
        let filter = cri::ContainerFilter { label_selector: labels(uid), ..Default::default() };
        self.ask(move |mut cri| async move {
            let asked = cri::ListContainersRequest { filter: Some(filter) };
            let items = cri.list_containers(asked).await.expect("a list").into_inner().containers;
            let is_up = |state| state == cri::ContainerState::ContainerRunning as i32;
            items.into_iter().map(|item| Held { is_up: is_up(item.state), id: item.id }).collect()
        })
    }

    /// Ids of all sandboxes and containers there are.
    pub fn all(&self) -> Vec<String> {
        self.ask(|mut cri| async move {
            let sandboxes = cri.list_pod_sandbox(cri::ListPodSandboxRequest::default()).await.expect("a list");
            let containers = cri.list_containers(cri::ListContainersRequest::default()).await.expect("a list");
            let sandboxes = sandboxes.into_inner().items.into_iter().map(|sandbox| sandbox.id);
            sandboxes.chain(containers.into_inner().containers.into_iter().map(|container| container.id)).collect()
        })
    }

    /// The process of a container.
    pub fn pid(&self, container: &str) -> u32 {
        let container_id = container.to_owned();
        let info = self.ask(move |mut cri| async move {
            let asked = cri::ContainerStatusRequest { container_id, verbose: true };
            cri.container_status(asked).await.expect("a status").into_inner().info
        });
        pid(&info).unwrap_or_else(|| panic!("{container} does not run: {info:?}"))
    }

    /// The process whose end is the sandbox's.
    pub fn sandbox_pid(&self, sandbox: &str) -> u32 {
        if let Self::Embedded(embedded) = self {
            return embedded.shim(sandbox);
        }
        let pod_sandbox_id = sandbox.to_owned();
        let info = self.ask(move |mut cri| async move {
            let asked = cri::PodSandboxStatusRequest { pod_sandbox_id, verbose: true };
            cri.pod_sandbox_status(asked).await.expect("a status").into_inner().info
        });
        pid(&info).unwrap_or_else(|| panic!("{sandbox} does not run: {info:?}"))
    }

    /// Asks the runtime's socket, from wherever that is called.
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
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let connection = connect(&config, &Registry::new()).expect("an endpoint");
                let client = RuntimeServiceClient::new(connection.runtime_channel());
                tokio::time::timeout(PATIENCE, question(client)).await.expect("an answer in time")
            })
        });
        asking.join().expect("an answer")
    }
}

fn labels(uid: &str) -> HashMap<String, String> {
    [(POD_UID.to_owned(), uid.to_owned())].into()
}

fn pid(info: &HashMap<String, String>) -> Option<u32> {
    let told: serde_json::Value = serde_json::from_str(info.get("info")?).ok()?;
    told["pid"].as_u64().filter(|pid| *pid > 0).and_then(|pid| u32::try_from(pid).ok())
}
