//! Facade of pod networks: selects the built-in network or CNI plugins per pod.
//!
//! Kernel calls run on the blocking pool with a timeout; plugins run as processes with their own timeout.
//! Implements spec 09b §10, §13.3, §14.

use std::{
    fs,
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::{net::TcpStream, sync::watch, task::spawn_blocking, time::timeout};
use tracing::{info, warn};

use super::{
    builtin::{self, BuiltinNetwork},
    cidr,
    cni::{CniRequest, Plugins},
    errors::NetworkError,
    loopback_dialer,
    mode::{self, ConfiguredMode, Mode, ReadinessInputs},
    names::{self, NamespaceFiles},
    pod_link,
    sandbox::{PodNetwork, SandboxNetwork},
};
use berth_sys::{failpoint, net_namespace};

/// Timeout of the kernel operations for one pod's network.
const LIMIT: Duration = Duration::from_secs(30);
/// Timeout of the recovery of all pods at start.
const RECOVERY_LIMIT: Duration = Duration::from_secs(120);

/// Network mode, built-in network, and CNI directories.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NetworkSettings {
    /// Configured mode.
    pub wanted: ConfiguredMode,
    /// Settings of the built-in network.
    pub builtin: builtin::BuiltinNetworkSettings,
    /// CNI configuration directory: `/etc/cni/net.d`.
    pub cni_directory: PathBuf,
    /// CNI plugin search path, in order.
    pub cni_programs: Vec<PathBuf>,
    /// CNI cache directory: `/var/lib/cni/results`.
    pub cni_cache: PathBuf,
    /// Timeout of a CNI plugin call.
    pub cni_limit: Duration,
    /// Directory of network namespace files: `/run/netns`.
    pub namespaces: PathBuf,
}

impl NetworkSettings {
    /// The defaults of spec 09b §10; the leases file is in `directory`.
    pub fn usual(directory: &Path) -> Self {
        let builtin = builtin::BuiltinNetworkSettings {
            bridge: names::bridge(),
            mtu: None,
            masquerade: true,
            no_masquerade: Vec::new(),
            host_ports: true,
            nets: Vec::new(),
            directory: directory.to_owned(),
        };
        Self {
            wanted: ConfiguredMode::Auto,
            builtin,
            cni_directory: "/etc/cni/net.d".into(),
            cni_programs: ["/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"].map(PathBuf::from).to_vec(),
            cni_cache: "/var/lib/cni/results".into(),
            cni_limit: Duration::from_secs(60),
            namespaces: "/run/netns".into(),
        }
    }
}

/// Networks of all pods; clones share one state.
#[derive(Clone, Debug)]
pub struct NetworkManager {
    pub(super) inner: Arc<NetworkManagerInner>,
}

#[derive(Debug)]
pub(super) struct NetworkManagerInner {
    wanted: ConfiguredMode,
    pub(super) namespaces: PathBuf,
    files: NamespaceFiles,
    disturbances: watch::Sender<u64>,
    pub(super) builtin: BuiltinNetwork,
    pub(super) plugins: Plugins,
}

impl NetworkManager {
    /// Reads the CNI configuration. [`Self::recover`] sets up the host, because the packet filter may only be replaced
    /// once the pods' host ports are known.
    ///
    /// # Errors
    /// The blocking task panicked.
    pub async fn open(settings: NetworkSettings) -> Result<Self, NetworkError> {
        let opened = spawn_blocking(move || {
            let NetworkSettings { wanted, builtin, cni_directory, cni_programs, cni_cache, cni_limit, namespaces } =
                settings;
            let files = NamespaceFiles::new(names::owner(&builtin.bridge), &builtin.directory);
            let plugins = Plugins::new(files.clone(), cni_directory, cni_programs, cni_cache, cni_limit);
            let (builtin, disturbances) = (BuiltinNetwork::new(builtin), watch::Sender::default());
            Self { inner: Arc::new(NetworkManagerInner { wanted, namespaces, files, disturbances, builtin, plugins }) }
        });
        opened.await.map_err(|e| NetworkError::kernel("network", std::io::Error::other(e)))
    }

    /// The mode for new pods.
    pub fn mode(&self) -> Mode {
        mode::choose(self.inner.wanted, self.inner.plugins.has_file())
    }

    /// Checks network readiness.
    ///
    /// # Errors
    /// The reason; the node condition prefixes it with `NetworkManager plugin returns error: `.
    pub async fn status(&self) -> Result<(), String> {
        let mode = self.mode();
        let cni_failure = match mode {
            Mode::Cni => self.inner.plugins.status().await.err(),
            Mode::Builtin => None,
        };
        mode::readiness(&ReadinessInputs {
            mode,
            cni_failure,
            has_pod_cidr: !self.inner.builtin.nets().is_empty(),
            bridge_failure: self.inner.builtin.failure(),
        })
    }

    /// Error of the last CNI configuration load for verbose status; `OK` if it is usable or not needed.
    pub fn last_cni_load(&self) -> String {
        if self.mode() == Mode::Builtin {
            return "OK".to_owned();
        }
        self.inner.plugins.network().err().unwrap_or_else(|| "OK".to_owned())
    }

    /// A limitation of an otherwise working network, as a message for the condition.
    pub async fn warning(&self) -> Option<String> {
        if self.mode() != Mode::Builtin {
            return None;
        }
        if !self.inner.builtin.firewall().has_filter() {
            return Some(mode::NO_FILTER.to_owned());
        }
        let inner = Arc::clone(&self.inner);
        // Without a result there is nothing to warn about.
        let chains = self.blocking("nf_tables", LIMIT, move || Ok(inner.builtin.firewall().dropping_chains())).await;
        mode::dropping_chains(&chains.unwrap_or_default())
    }

    /// Sets the pod CIDRs for new leases: `10.1.0.0/24,fd00::/64`. Empty text changes nothing.
    ///
    /// # Errors
    /// A CIDR is malformed, or setting up the host fails.
    pub async fn update_pod_cidr(&self, text: &str) -> Result<(), NetworkError> {
        let nets = cidr::one_of_each(text)?;
        if nets.is_empty() {
            return Ok(());
        }
        info!(podCIDR = text, "Updated pod CIDR");
        let (inner, prepares) = (Arc::clone(&self.inner), self.mode() == Mode::Builtin);
        self.blocking("apply pod CIDR", LIMIT, move || inner.builtin.set_nets(&nets, prepares)).await
    }

    /// Path of a sandbox's network namespace file.
    pub fn namespace_file(&self, sandbox: &str) -> PathBuf {
        self.inner.namespace_file(sandbox)
    }

    /// Sets up the network of a pod. Rolls back on failure.
    ///
    /// # Errors
    /// The step that failed.
    pub async fn setup(&self, pod: &SandboxNetwork) -> Result<PodNetwork, NetworkError> {
        let file = self.namespace_file(&pod.id);
        let (namespace, at) = (pod.netns.clone(), file.clone());
        self.blocking("network namespace", LIMIT, move || {
            let namespace = namespace.ok_or_else(|| NetworkError::NotReady("no network namespace".to_owned()))?;
            let failed = |e| NetworkError::kernel(format!("network namespace {}", at.display()), e);
            net_namespace::bind_file(&at, namespace.as_fd()).map_err(failed)?;
            failpoint::reached("network.file");
            pod_link::loopback_up(namespace.as_fd()).map_err(failed)
        })
        .await?;
        let attached = match self.mode() {
            Mode::Builtin => {
                let (inner, pod) = (Arc::clone(&self.inner), pod.clone());
                self.blocking("pod's network", LIMIT, move || inner.builtin.setup(&pod)).await
            }
            Mode::Cni => self.add(pod, file.clone()).await,
        };
        if attached.is_err() {
            let removed = self.blocking("network namespace", LIMIT, move || unbind(&file)).await;
            if let Err(e) = removed {
                warn!(podSandboxID = %pod.id, err = %e, "Failed to remove network namespace file");
            }
        }
        attached
    }

    async fn add(&self, pod: &SandboxNetwork, netns: PathBuf) -> Result<PodNetwork, NetworkError> {
        let request = request(pod, netns)?;
        let (ips, result) = self.inner.plugins.add(&request).await.map_err(NetworkError::Cni)?;
        Ok(PodNetwork { mode: Mode::Cni, ips, result })
    }

    /// Tears down a pod's network with the mode that created it. Idempotent, also for pods without a network.
    ///
    /// # Errors
    /// The step that failed; the next call retries what remains.
    pub async fn teardown(&self, pod: &SandboxNetwork) -> Result<(), NetworkError> {
        let file = self.namespace_file(&pod.id);
        let mode = self.mode_of(pod).await?;
        if mode == Mode::Cni {
            let request = request(pod, file.clone())?;
            self.inner.plugins.del(&request).await.map_err(NetworkError::Cni)?;
        }
        let (inner, pod) = (Arc::clone(&self.inner), pod.clone());
        self.blocking("pod's network", LIMIT, move || {
            if mode == Mode::Builtin {
                inner.builtin.teardown(&pod)?;
            }
            unbind(&file)
        })
        .await
    }

    /// The mode that created a pod's network, even if its setup never completed.
    async fn mode_of(&self, pod: &SandboxNetwork) -> Result<Mode, NetworkError> {
        if let Some(attached) = &pod.attached {
            return Ok(attached.mode);
        }
        let (inner, id, now) = (Arc::clone(&self.inner), pod.id.clone(), self.mode());
        self.blocking("pod's network", LIMIT, move || {
            let is_builtin = !inner.builtin.addresses(&id).is_empty();
            Ok(if is_builtin {
                Mode::Builtin
            } else if inner.plugins.has_attachment(&id) {
                Mode::Cni
            } else {
                now
            })
        })
        .await
    }

    /// Recovers the networks once after every start, also without pods. `pods` are all sandboxes of this boot that have
    /// a network: sets up the host for them, and removes everything that belongs to none of them. Returns the ids of
    /// sandboxes whose network is lost.
    ///
    /// # Errors
    /// A kernel request fails. If the host could not be set up, [`Self::status`] reports it as well, and the next pod
    /// retries.
    pub async fn recover(&self, pods: &[SandboxNetwork]) -> Result<Vec<String>, NetworkError> {
        let ids: Vec<&str> = pods.iter().map(|p| p.id.as_str()).collect();
        let plugins = timeout(RECOVERY_LIMIT, self.inner.plugins.recover(&ids));
        if plugins.await.is_err() {
            warn!(limit = ?RECOVERY_LIMIT, "Timed out removing CNI attachments of deleted sandboxes");
        }
        let (inner, pods, prepares) = (Arc::clone(&self.inner), pods.to_vec(), self.mode() == Mode::Builtin);
        self.blocking("recover pod networks", RECOVERY_LIMIT, move || {
            let lost = inner.builtin.recover(&pods, prepares).map(|mut lost| {
                let is_bound = |id: &str| net_namespace::is_bound(&inner.namespace_file(id));
                let unnamed = pods.iter().filter(|pod| !lost.contains(&pod.id) && !is_bound(&pod.id));
                let unnamed: Vec<String> = unnamed.map(|pod| pod.id.clone()).collect();
                lost.extend(unnamed);
                lost
            });
            let kept: Vec<String> = pods.iter().map(|pod| inner.files.name(&pod.id)).collect();
            for entry in fs::read_dir(&inner.namespaces).into_iter().flatten().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                if inner.files.is_ours(&name) && !kept.contains(&name) {
                    unbind(&entry.path())?;
                }
            }
            lost
        })
        .await
    }

    /// The ids of sandboxes whose network is lost: the namespace file or, for the built-in network, the link is gone.
    ///
    /// # Errors
    /// A kernel request fails.
    pub async fn lost(&self, pods: &[SandboxNetwork]) -> Result<Vec<String>, NetworkError> {
        let candidates: Vec<_> = pods.iter().map(|pod| (pod.id.clone(), pod.is_builtin())).collect();
        let network = self.clone();
        self.blocking("check pod networks", LIMIT, move || {
            let linked = pod_link::linked().map_err(|e| NetworkError::kernel("list pod network interfaces", e))?;
            let is_lost = |(id, is_builtin): &(String, bool)| {
                (*is_builtin && !linked.contains(id)) || !net_namespace::is_bound(&network.namespace_file(id))
            };
            Ok(candidates.into_iter().filter(is_lost).map(|(id, _)| id).collect())
        })
        .await
    }

    /// Changes whenever a link or a namespace file was removed that may have been a pod's.
    pub fn disturbances(&self) -> watch::Receiver<u64> {
        self.inner.disturbances.subscribe()
    }

    pub(super) fn notify_disturbance(&self) {
        self.inner.disturbances.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Connects to a port on a pod's loopback, by its network namespace file; on the host if `netns` is `None`.
    ///
    /// # Errors
    /// The errors of both IP versions, or that the namespace cannot be opened.
    pub async fn dial(&self, netns: Option<&Path>, sandbox: &str, port: u16) -> Result<TcpStream, NetworkError> {
        let (id, netns) = (sandbox.to_owned(), netns.map(Path::to_owned));
        let make = move || {
            let failed = |e| NetworkError::kernel(format!("network namespace of {id}"), e);
            let namespace = netns.map(|file| net_namespace::open_file(&file)).transpose().map_err(failed)?;
            loopback_dialer::sockets(namespace.as_ref().map(AsFd::as_fd)).map_err(failed)
        };
        let sockets = self.blocking("list sockets of the pod", LIMIT, make).await?;
        loopback_dialer::connect(sockets, sandbox, port).await
    }

    /// Number of leased IPv4 and IPv6 addresses.
    pub fn leased(&self) -> (usize, usize) {
        self.inner.builtin.leased()
    }

    /// Number of times the packet filter was restored after another program removed part of it.
    pub fn filter_reapplied(&self) -> u64 {
        self.inner.builtin.firewall().reapplied()
    }

    pub(super) async fn blocking<T: Send + 'static>(
        &self,
        what: &'static str,
        limit: Duration,
        act: impl FnOnce() -> Result<T, NetworkError> + Send + 'static,
    ) -> Result<T, NetworkError> {
        match timeout(limit, spawn_blocking(act)).await {
            Ok(Ok(result)) => result,
            Ok(Err(e)) => Err(NetworkError::kernel(what, std::io::Error::other(e))),
            Err(_) => Err(NetworkError::TimedOut { what, limit }),
        }
    }
}

impl NetworkManagerInner {
    fn namespace_file(&self, sandbox: &str) -> PathBuf {
        let named = |name: String| self.namespaces.join(name);
        let file = named(self.files.name(sandbox));
        // Pods of an earlier version keep their untagged file.
        let untagged = (!file.exists()).then(|| named(self.files.untagged(sandbox))).filter(|file| file.exists());
        untagged.unwrap_or(file)
    }
}

fn request(pod: &SandboxNetwork, netns: PathBuf) -> Result<CniRequest, NetworkError> {
    Ok(CniRequest { sandbox: pod.id.clone(), netns, args: pod.plugin_args(), known: pod.runtime_config()? })
}

fn unbind(file: &Path) -> Result<(), NetworkError> {
    net_namespace::unbind_file(file)
        .map_err(|e| NetworkError::kernel(format!("network namespace {}", file.display()), e))
}
