//! Embedded runtime inside the test process, called over an in-memory connection as the agent does.
//!
//! Needs root, busybox-static, and the shim binary beside the test.

use std::{path::Path, sync::Arc, time::Duration};

use berth_cri::{CriClients, CriConfig, Dial, connect_over};
use berth_metrics::Registry;
use berth_proto::cri;
use berth_runtime::{
    config::{EmbeddedConfig, NetworkConfig},
    cri as services,
    images::ImageStore,
    runtime::Runtime,
    wiring::{self, RuntimeEnvironment},
};
use hyper_util::rt::TokioIo;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::transport::Endpoint;

use super::{
    super::{
        cri_calls::{self, Calls},
        image::{BUSYBOX, Image, write_archive},
    },
    fixture::{bridge, group},
};

/// Deadline of calls and container exits.
const LIMIT: Duration = Duration::from_secs(60);

/// Embedded runtime with clients of its CRI services.
pub struct Daemon {
    /// CRI client.
    pub calls: Calls,
    /// Embedded runtime in this process, for direct access to its sandboxes.
    pub runtime: Arc<Runtime>,
    /// Image store.
    pub images: ImageStore,
    /// Stops the runtime; pods keep running.
    pub stop: CancellationToken,
    dial: Dial,
}

/// Whether the built-in images are created.
#[derive(PartialEq, Eq)]
pub enum Builtin {
    /// Built-in images are created.
    Made,
    /// Busybox is imported instead.
    Missing,
}

/// Starts a runtime with busybox in a directory.
pub async fn daemon(place: &Path) -> Daemon {
    daemon_with(place, Builtin::Missing).await
}

/// Starts a runtime in a directory.
pub async fn daemon_with(place: &Path, builtin: Builtin) -> Daemon {
    let network = NetworkConfig { mode: "builtin".to_owned(), bridge: bridge(place), ..NetworkConfig::default() };
    let (root, state) = (place.join("root"), place.join("state"));
    let (import_dir, cgroup_driver) = (place.join("archives"), "cgroupfs".to_owned());
    let cdi_spec_dirs = vec![place.join("cdi")];
    let config =
        EmbeddedConfig { root, state, network, import_dir, cgroup_driver, cdi_spec_dirs, ..EmbeddedConfig::default() };
    let stop = CancellationToken::new();
    let around = RuntimeEnvironment {
        hostname: "node".to_owned(),
        has_builtin_images: builtin == Builtin::Made,
        unpacker: None,
        tasks: TaskTracker::new(),
        stop: stop.clone(),
    };
    let (runtime, images) = wiring::open(config, around).await.expect("opened");
    if builtin == Builtin::Missing {
        has_busybox(&images, place).await;
    }
    let recovery = wiring::start(&runtime);
    runtime.shell.spawn(async move { eprintln!("{}", recovery.failed().await) });
    let memory = services::over_memory(&runtime, stop.clone());
    let dial: Dial = Arc::new(move || {
        let memory = memory.clone();
        Box::pin(async move { memory.connect().await })
    });
    let dialled = dial.clone();
    let connector = tower::service_fn(move |_: http::Uri| {
        let dialled = dialled.clone();
        async move { dialled().await.map(TokioIo::new) }
    });
    let calls = Calls::over(Endpoint::from_static("http://memory").connect_with_connector_lazy(connector));
    Daemon { calls, runtime, images, stop, dial }
}

/// Imports busybox unless the store has it.
pub async fn has_busybox(images: &ImageStore, place: &Path) {
    if images.status(BUSYBOX).expect("asked").is_none() {
        let archive = place.join("busybox.tar");
        write_archive(&[Image::busybox(BUSYBOX)], &archive).expect("written");
        images.import(&archive, None).await.expect("imported");
    }
}

/// Sandbox configuration of a pod on the host network.
pub fn pod(place: &Path, name: &str) -> cri::PodSandboxConfig {
    let namespaces = cri::NamespaceOption {
        network: cri::NamespaceMode::Node.into(),
        pid: cri::NamespaceMode::Container.into(),
        ..Default::default()
    };
    let mut config = cri_calls::sandbox(name, namespaces);
    config.log_directory = place.join("logs").display().to_string();
    config.linux.as_mut().expect("given").cgroup_parent = format!("/{}", group(place));
    config
}

/// Container configuration that runs a script in its own PID namespace.
pub fn container(name: &str, script: &str) -> cri::ContainerConfig {
    cri_calls::container(name, script, cri::NamespaceMode::Container)
}

impl Daemon {
    /// Connection of the agent's own CRI clients.
    pub fn connection(&self, registry: &Registry) -> CriClients {
        let config = CriConfig {
            endpoint: "embedded".to_owned(),
            image_endpoint: String::new(),
            request_timeout: LIMIT,
            list_streaming: true,
        };
        connect_over(self.dial.clone(), &config, registry)
    }

    /// Runs a sandbox; returns its ID.
    pub async fn run(&self, config: cri::PodSandboxConfig) -> String {
        self.calls.run(&config).await.expect("runs")
    }

    /// Creates and starts a container; returns its ID.
    pub async fn start(&self, sandbox: &str, config: cri::ContainerConfig) -> String {
        self.calls.running(sandbox, &config).await
    }

    /// Runs a script in a container; returns its standard output and exit code.
    pub async fn exec(&self, id: &str, script: &str) -> (String, i32) {
        self.calls.exec(id, script).await.expect("executed")
    }

    /// Status of a container.
    pub async fn status(&self, id: &str) -> cri::ContainerStatus {
        self.calls.status(id).await
    }

    /// Waits until a container has exited; returns its status.
    pub async fn exited(&self, id: &str) -> cri::ContainerStatus {
        let (pod, id) = self.runtime.container(id).expect("known");
        let over = pod.wait_for(|sandbox| sandbox.container(&id).is_ok_and(|c| c.finished().is_some()));
        tokio::time::timeout(LIMIT, over).await.expect("timed out").expect("ends");
        self.status(&id).await
    }

    /// Removes a sandbox with its containers.
    pub async fn remove(&self, id: &str) {
        self.calls.remove(id).await.expect("goes");
    }
}

/// Image and sandbox calls.
impl Daemon {
    /// Pulls an image; returns its reference.
    ///
    /// # Errors
    /// The pull failed.
    pub async fn pull(&self, name: &str) -> Result<String, tonic::Status> {
        let request = cri::PullImageRequest { image: spec(name), ..Default::default() };
        Ok(self.calls.images.clone().pull_image(request).await?.into_inner().image_ref)
    }

    /// Status of an image; `None` if it is absent.
    pub async fn image(&self, name: &str) -> Option<cri::Image> {
        let request = cri::ImageStatusRequest { image: spec(name), verbose: false };
        self.calls.images.clone().image_status(request).await.expect("answered").into_inner().image
    }

    /// Removes an image through the CRI; panics if the call fails.
    pub async fn remove_image(&self, name: &str) {
        let request = cri::RemoveImageRequest { image: spec(name) };
        self.calls.images.clone().remove_image(request).await.expect("removed");
    }

    /// Images of a registry, by its host.
    pub async fn images_of(&self, host: &str) -> Vec<cri::Image> {
        let listed = self.calls.images.clone().list_images(cri::ListImagesRequest::default()).await.expect("listed");
        let is_of = |image: &cri::Image| image.repo_tags.iter().chain(&image.repo_digests).any(|n| n.starts_with(host));
        listed.into_inner().images.into_iter().filter(is_of).collect()
    }

    /// The status of a sandbox.
    pub async fn pod_status(&self, id: &str) -> cri::PodSandboxStatus {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: false };
        self.calls
            .rpc
            .clone()
            .pod_sandbox_status(request)
            .await
            .expect("known")
            .into_inner()
            .status
            .expect("response without status")
    }

    /// The IP address of a sandbox.
    pub async fn address(&self, id: &str) -> String {
        self.pod_status(id).await.network.expect("status without network").ip
    }

    /// Waits until a sandbox is no longer ready.
    pub async fn until_not_ready(&self, id: &str) {
        let pod = self.runtime.pod(id).expect("known");
        let over = pod.wait_for(|sandbox| !sandbox.is_ready());
        tokio::time::timeout(LIMIT, over).await.expect("timed out").expect("there");
        assert_eq!(self.pod_status(id).await.state(), cri::PodSandboxState::SandboxNotready);
    }
}

/// Image reference of a CRI request.
pub fn spec(name: &str) -> Option<cri::ImageSpec> {
    Some(cri::ImageSpec { image: name.to_owned(), ..Default::default() })
}
