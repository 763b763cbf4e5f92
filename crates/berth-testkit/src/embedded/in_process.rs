//! The embedded runtime in the test's own process, asked over memory as the agent asks it.
//!
//! Needs root, busybox-static and the shim's program beside the test.

use std::{path::Path, sync::Arc, time::Duration};

use berth_cri::{Connection, CriConfig, Dial, connect_over};
use berth_metrics::Registry;
use berth_proto::cri;
use berth_runtime::{
    config::{EmbeddedConfig, NetworkConfig},
    cri as services,
    images::ImageStore,
    parts::{self, Surroundings},
    runtime::Runtime,
};
use hyper_util::rt::TokioIo;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::transport::Endpoint;

use super::{
    super::{
        cri_calls::{self, Calls},
        image::{BUSYBOX, Image, write_archive},
    },
    place::{bridge, group},
};

/// How long an end may take to come, and a call.
const LIMIT: Duration = Duration::from_secs(60);

/// A runtime.
pub struct Daemon {
    /// Asks its services.
    pub calls: Calls,
    /// What answers.
    pub runtime: Arc<Runtime>,
    /// Its images.
    pub images: ImageStore,
    /// Ends it; pods go on.
    pub stop: CancellationToken,
    dial: Dial,
}

/// Whether the built-in images are made.
#[derive(PartialEq, Eq)]
pub enum Builtin {
    /// They are.
    Made,
    /// There is busybox instead.
    Missing,
}

/// A runtime with busybox in a place.
pub async fn daemon(place: &Path) -> Daemon {
    daemon_with(place, Builtin::Missing).await
}

/// A runtime in a place.
pub async fn daemon_with(place: &Path, builtin: Builtin) -> Daemon {
    let network = NetworkConfig { mode: "builtin".to_owned(), bridge: bridge(place), ..NetworkConfig::default() };
    let (root, state) = (place.join("root"), place.join("state"));
    let (import_dir, cgroup_driver) = (place.join("archives"), "cgroupfs".to_owned());
    let cdi_spec_dirs = vec![place.join("cdi")];
    let config =
        EmbeddedConfig { root, state, network, import_dir, cgroup_driver, cdi_spec_dirs, ..EmbeddedConfig::default() };
    let stop = CancellationToken::new();
    let around = Surroundings {
        hostname: "node".to_owned(),
        has_builtin_images: builtin == Builtin::Made,
        unpacker: None,
        tasks: TaskTracker::new(),
        stop: stop.clone(),
    };
    let (runtime, images) = parts::open(config, around).await.expect("opened");
    if builtin == Builtin::Missing {
        has_busybox(&images, place).await;
    }
    let recovery = parts::start(&runtime);
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

/// Imports busybox into a store that has none.
pub async fn has_busybox(images: &ImageStore, place: &Path) {
    if images.status(BUSYBOX).expect("asked").is_none() {
        let archive = place.join("busybox.tar");
        write_archive(&[Image::busybox(BUSYBOX)], &archive).expect("written");
        images.import(&archive, None).await.expect("imported");
    }
}

/// A pod on this machine's network.
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

/// A container that runs a script and sees its own processes only.
pub fn container(name: &str, script: &str) -> cri::ContainerConfig {
    cri_calls::container(name, script, cri::NamespaceMode::Container)
}

impl Daemon {
    /// The agent's own clients.
    pub fn connection(&self, registry: &Registry) -> Connection {
        let config = CriConfig {
            endpoint: "embedded".to_owned(),
            image_endpoint: String::new(),
            request_timeout: LIMIT,
            list_streaming: true,
        };
        connect_over(self.dial.clone(), &config, registry)
    }

    /// Runs a sandbox; its id.
    pub async fn run(&self, config: cri::PodSandboxConfig) -> String {
        self.calls.run(&config).await.expect("runs")
    }

    /// A container that runs; its id.
    pub async fn start(&self, sandbox: &str, config: cri::ContainerConfig) -> String {
        self.calls.running(sandbox, &config).await
    }

    /// Runs a script in a container: what it writes, and its code.
    pub async fn exec(&self, id: &str, script: &str) -> (String, i32) {
        self.calls.exec(id, script).await.expect("executed")
    }

    /// What a container is.
    pub async fn status(&self, id: &str) -> cri::ContainerStatus {
        self.calls.status(id).await
    }

    /// What a container was when it has ended.
    pub async fn exited(&self, id: &str) -> cri::ContainerStatus {
        let (pod, id) = self.runtime.container(id).expect("known");
        let over = pod.wait_for(|sandbox| sandbox.container(&id).is_ok_and(|c| c.finished().is_some()));
        tokio::time::timeout(LIMIT, over).await.expect("in time").expect("ends");
        self.status(&id).await
    }

    /// Removes a sandbox with all that is in it.
    pub async fn remove(&self, id: &str) {
        self.calls.remove(id).await.expect("goes");
    }
}

/// Calls of images and sandboxes.
impl Daemon {
    /// Pulls an image; its reference.
    pub async fn pull(&self, name: &str) -> Result<String, tonic::Status> {
        let request = cri::PullImageRequest { image: spec(name), ..Default::default() };
        Ok(self.calls.images.clone().pull_image(request).await?.into_inner().image_ref)
    }

    /// The status of an image; `None` if it is not there.
    pub async fn image(&self, name: &str) -> Option<cri::Image> {
        let request = cri::ImageStatusRequest { image: spec(name), verbose: false };
        self.calls.images.clone().image_status(request).await.expect("answered").into_inner().image
    }

    /// Removes an image.
    pub async fn remove_image(&self, name: &str) {
        let request = cri::RemoveImageRequest { image: spec(name) };
        self.calls.images.clone().remove_image(request).await.expect("removed");
    }

    /// The images of a registry, by its host.
    pub async fn images_of(&self, host: &str) -> Vec<cri::Image> {
        let listed = self.calls.images.clone().list_images(cri::ListImagesRequest::default()).await.expect("listed");
        let is_of = |image: &cri::Image| image.repo_tags.iter().chain(&image.repo_digests).any(|n| n.starts_with(host));
        listed.into_inner().images.into_iter().filter(is_of).collect()
    }

    /// The status of a sandbox.
    pub async fn pod_status(&self, id: &str) -> cri::PodSandboxStatus {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: false };
        self.calls.rpc.clone().pod_sandbox_status(request).await.expect("known").into_inner().status.expect("a status")
    }

    /// The IP address of a sandbox.
    pub async fn address(&self, id: &str) -> String {
        self.pod_status(id).await.network.expect("a network").ip
    }

    /// Waits until a sandbox is not ready any more.
    pub async fn until_not_ready(&self, id: &str) {
        let pod = self.runtime.pod(id).expect("known");
        let over = pod.wait_for(|sandbox| !sandbox.is_ready());
        tokio::time::timeout(LIMIT, over).await.expect("in time").expect("there");
        assert_eq!(self.pod_status(id).await.state(), cri::PodSandboxState::SandboxNotready);
    }
}

/// An image by any of its names, as requests have it.
pub fn spec(name: &str) -> Option<cri::ImageSpec> {
    Some(cri::ImageSpec { image: name.to_owned(), ..Default::default() })
}
