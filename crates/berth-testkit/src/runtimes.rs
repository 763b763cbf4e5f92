//! Real runtimes behind the agent's CRI clients: private containerd, or in-process embedded runtime.
//!
//! Modules that talk to a runtime run the same tests once on each.

use std::{path::Path, time::Duration};

use berth_cri::{CriClients, CriConfig, connect};
use berth_metrics::Registry;
use berth_proto::cri;

use super::{
    containerd::{self, Containerd},
    cri_calls,
    embedded::{
        fixture::{self, RuntimeFixture},
        in_process::{self, Daemon, daemon},
    },
    image::{Image, write_archive},
};

/// Deadline of a call.
const LIMIT: Duration = Duration::from_secs(30);

/// Generates two tests of each function, one per runtime.
#[macro_export]
macro_rules! on_real_runtimes {
    ($($name:ident)*) => {
        mod on_containerd {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name($crate::runtimes::TestRuntime::Containerd(stringify!($name))).await;
            })*
        }

        mod on_embedded {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name($crate::runtimes::TestRuntime::Embedded(stringify!($name))).await;
            })*
        }
    };
}

/// Runtime of a test, with the test's name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum TestRuntime {
    /// Private containerd.
    Containerd(&'static str),
    /// Embedded runtime in this process.
    Embedded(&'static str),
}

impl TestRuntime {
    /// Starts the runtime; prints a message and returns `None` if this machine cannot run it.
    pub async fn runtime(self) -> Option<Runtime> {
        match self {
            Self::Containerd(test) => containerd::start_or_skip(test).map(Runtime::Containerd),
            Self::Embedded(test) if fixture::skips(test) => None,
            Self::Embedded(_) => {
                let place = RuntimeFixture::new();
                Some(Runtime::Embedded(Box::new(daemon(place.path()).await), place))
            }
        }
    }
}

/// Running runtime with busybox; drop removes what tests leave in it.
pub enum Runtime {
    /// Separate process.
    Containerd(Containerd),
    /// In this process.
    Embedded(Box<Daemon>, RuntimeFixture),
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if let Self::Embedded(daemon, _) = self {
            daemon.stop.cancel();
        }
    }
}

impl Runtime {
    /// Connection of the agent's CRI clients.
    pub fn connection(&self, registry: &Registry) -> CriClients {
        match self {
            Self::Containerd(containerd) => {
                let (endpoint, image_endpoint) = (containerd.endpoint(), String::new());
                let config = CriConfig { endpoint, image_endpoint, request_timeout: LIMIT, list_streaming: true };
                connect(&config, registry).expect("failed to connect to the runtime")
            }
            Self::Embedded(daemon, _) => daemon.connection(registry),
        }
    }

    /// Temporary directory, removed on drop.
    pub fn dir(&self) -> &Path {
        match self {
            Self::Containerd(containerd) => containerd.dir(),
            Self::Embedded(_, place) => place.path(),
        }
    }

    /// Imports images.
    pub async fn import(&self, images: &[Image<'_>]) {
        match self {
            Self::Containerd(containerd) => containerd.import(images),
            Self::Embedded(daemon, place) => {
                let archive = place.path().join("more.tar");
                write_archive(images, &archive).expect("written");
                daemon.images.import(&archive, None).await.expect("imported");
            }
        }
    }

    /// Sandbox configuration of a pod on the host network.
    pub fn pod(&self, name: &str) -> cri::PodSandboxConfig {
        match self {
            Self::Containerd(containerd) => {
                let network = cri::NamespaceMode::Node.into();
                let namespaces = cri::NamespaceOption { network, ..Default::default() };
                let log_directory = containerd.dir().join("logs").display().to_string();
                cri::PodSandboxConfig { log_directory, ..cri_calls::sandbox(name, namespaces) }
            }
            Self::Embedded(_, place) => in_process::pod(place.path(), name),
        }
    }
}
