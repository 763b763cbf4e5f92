//! The door to pods' networks: chooses who makes one, remembers what is in the way.
//!
//! Kernel calls run on the blocking pool and have a deadline; plugins run as processes and have theirs.
//! Behaviour: spec 09b §10, §13.3, §14.

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
    builtin::{self, Builtin},
    cidr,
    cni::{Plugins, Request},
    dial,
    errors::NetworkError,
    mode::{self, Facts, Mode, Wanted},
    names::{self, NamespaceFiles},
    pod_link,
    sandbox::{Attached, SandboxNetwork},
};
use berth_sys::{net_namespace, step};

/// How long the kernel's part of a pod's network may take.
const LIMIT: Duration = Duration::from_secs(30);
/// How long all pods together may take at start.
const RECOVERY_LIMIT: Duration = Duration::from_secs(120);

/// How the network is configured.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Who makes networks.
    pub wanted: Wanted,
    /// The built-in network.
    pub builtin: builtin::Settings,
    /// Where configurations of plugins are: `/etc/cni/net.d`.
    pub cni_directory: PathBuf,
    /// Where plugins are, in order.
    pub cni_programs: Vec<PathBuf>,
    /// Where it is kept what pods were added with: `/var/lib/cni/results`.
    pub cni_cache: PathBuf,
    /// How long a plugin may take.
    pub cni_limit: Duration,
    /// Where files name network namespaces: `/run/netns`.
    pub namespaces: PathBuf,
}

impl Settings {
    /// The defaults of spec 09b §10; leases are written below `directory`.
    pub fn usual(directory: &Path) -> Self {
        let builtin = builtin::Settings {
            bridge: names::bridge(),
            mtu: None,
            masquerade: true,
            no_masquerade: Vec::new(),
            host_ports: true,
            nets: Vec::new(),
            directory: directory.to_owned(),
        };
        Self {
            wanted: Wanted::Auto,
            builtin,
            cni_directory: "/etc/cni/net.d".into(),
            cni_programs: ["/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"].map(PathBuf::from).to_vec(),
            cni_cache: "/var/lib/cni/results".into(),
            cni_limit: Duration::from_secs(60),
            namespaces: "/run/netns".into(),
        }
    }
}

/// Pods' networks.
#[derive(Clone, Debug)]
pub struct Network {
    pub(super) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(super) struct Inner {
    wanted: Wanted,
    pub(super) namespaces: PathBuf,
    files: NamespaceFiles,
    disturbances: watch::Sender<u64>,
    pub(super) builtin: Builtin,
    pub(super) plugins: Plugins,
}

impl Network {
    /// Reads the plugins' configuration. The machine is set up by [`Self::recover`]: the packet filter is replaced once it is
    /// known which ports pods have.
    ///
    /// # Errors
    /// Only where reading died.
    pub async fn open(settings: Settings) -> Result<Self, NetworkError> {
        let opened = spawn_blocking(move || {
            let Settings { wanted, builtin, cni_directory, cni_programs, cni_cache, cni_limit, namespaces } = settings;
            let files = NamespaceFiles::new(names::owner(&builtin.bridge), &builtin.directory);
            let plugins = Plugins::new(files.clone(), cni_directory, cni_programs, cni_cache, cni_limit);
            let (builtin, disturbances) = (Builtin::new(builtin), watch::Sender::default());
            Self { inner: Arc::new(Inner { wanted, namespaces, files, disturbances, builtin, plugins }) }
        });
        opened.await.map_err(|e| NetworkError::kernel("network", std::io::Error::other(e)))
    }

    /// Who makes the networks of new pods.
    pub fn mode(&self) -> Mode {
        mode::choose(self.inner.wanted, self.inner.plugins.has_file())
    }

    /// Whether pods can have a network.
    ///
    /// # Errors
    /// Why not; the node's condition says `Network plugin returns error: ` before it.
    pub async fn status(&self) -> Result<(), String> {
        let mode = self.mode();
        let cni_failure = match mode {
            Mode::Cni => self.inner.plugins.status().await.err(),
            Mode::Builtin => None,
        };
        mode::readiness(&Facts {
            mode,
            cni_failure,
            has_pod_cidr: !self.inner.builtin.nets().is_empty(),
            bridge_failure: self.inner.builtin.failure(),
        })
    }

    /// Why the plugins' configuration cannot be used; `OK` where it can, or nobody needs one. For verbose status.
    pub fn last_cni_load(&self) -> String {
        if self.mode() == Mode::Builtin {
            return "OK".to_owned();
        }
        self.inner.plugins.network().err().unwrap_or_else(|| "OK".to_owned())
    }

    /// What limits pods' networks although they work; a message for the condition.
    pub async fn warning(&self) -> Option<String> {
        if self.mode() != Mode::Builtin {
            return None;
        }
        if !self.inner.builtin.firewall().has_filter() {
            return Some(mode::NO_FILTER.to_owned());
        }
        let inner = Arc::clone(&self.inner);
        // Without an answer there is nothing to warn of.
        let chains = self.blocking("nf_tables", LIMIT, move || Ok(inner.builtin.firewall().dropping_chains())).await;
        mode::dropping_chains(&chains.unwrap_or_default())
    }

    /// Gives pods addresses of other ranges from now on: `10.1.0.0/24,fd00::/64`. Empty changes nothing.
    ///
    /// # Errors
    /// Ranges that are none, or what the kernel says.
    pub async fn update_pod_cidr(&self, text: &str) -> Result<(), NetworkError> {
        let nets = cidr::one_of_each(text)?;
        if nets.is_empty() {
            return Ok(());
        }
        info!(podCIDR = text, "Pod CIDR");
        let (inner, prepares) = (Arc::clone(&self.inner), self.mode() == Mode::Builtin);
        self.blocking("pod CIDR", LIMIT, move || inner.builtin.set_nets(&nets, prepares)).await
    }

    /// The file that names a sandbox's network namespace.
    pub fn namespace_file(&self, sandbox: &str) -> PathBuf {
        self.inner.namespace_file(sandbox)
    }

    /// Gives a pod its network. Nothing is left of it when it fails.
    ///
    /// # Errors
    /// What failed.
    pub async fn setup(&self, pod: &SandboxNetwork) -> Result<Attached, NetworkError> {
        let file = self.namespace_file(&pod.id);
        let (namespace, at) = (pod.netns.clone(), file.clone());
        self.blocking("network namespace", LIMIT, move || {
            let namespace = namespace.ok_or_else(|| NetworkError::NotReady("no network namespace".to_owned()))?;
            let failed = |e| NetworkError::kernel(format!("network namespace {}", at.display()), e);
            net_namespace::bind_file(&at, namespace.as_fd()).map_err(failed)?;
            step::reached("network.file");
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
                warn!(podSandboxID = %pod.id, err = %e, "Network namespace's file not removed");
            }
        }
        attached
    }

    async fn add(&self, pod: &SandboxNetwork, netns: PathBuf) -> Result<Attached, NetworkError> {
        let request = request(pod, netns)?;
        let (ips, result) = self.inner.plugins.add(&request).await.map_err(NetworkError::Cni)?;
        Ok(Attached { mode: Mode::Cni, ips, result })
    }

    /// Takes a pod's network down, the way it was made. May be called again, and for pods that have none.
    ///
    /// # Errors
    /// What failed; what is left is tried again with the next call.
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

    /// Who made a pod's network, also where setting it up was never told to have ended.
    async fn mode_of(&self, pod: &SandboxNetwork) -> Result<Mode, NetworkError> {
        if let Some(attached) = &pod.attached {
            return Ok(attached.mode);
        }
        let (inner, id, now) = (Arc::clone(&self.inner), pod.id.clone(), self.mode());
        self.blocking("pod's network", LIMIT, move || {
            let is_builtin = !inner.builtin.addresses(&id).is_empty();
            Ok(if is_builtin {
                Mode::Builtin
            } else if inner.plugins.knows(&id) {
                Mode::Cni
            } else {
                now
            })
        })
        .await
    }

    /// Takes over, once after every start, also where there are no pods: told all sandboxes of this boot that have a network,
    /// sets the machine up for them, and removes what belongs to none of them. Tells the sandboxes whose network is gone.
    ///
    /// # Errors
    /// What the kernel says. Where the machine could not be set up [`Self::status`] says so too, and the next pod tries
    /// again.
    pub async fn recover(&self, pods: &[SandboxNetwork]) -> Result<Vec<String>, NetworkError> {
        let ids: Vec<&str> = pods.iter().map(|p| p.id.as_str()).collect();
        let plugins = timeout(RECOVERY_LIMIT, self.inner.plugins.recover(&ids));
        if plugins.await.is_err() {
            warn!(limit = ?RECOVERY_LIMIT, "CNI attachments of sandboxes that are gone not all removed");
        }
        let (inner, pods, prepares) = (Arc::clone(&self.inner), pods.to_vec(), self.mode() == Mode::Builtin);
        self.blocking("recovery of networks", RECOVERY_LIMIT, move || {
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

    /// The sandboxes among these whose network is gone: the file that names its namespace, or the link to it.
    ///
    /// # Errors
    /// What the kernel says.
    pub async fn lost(&self, pods: &[SandboxNetwork]) -> Result<Vec<String>, NetworkError> {
        let looked: Vec<_> = pods.iter().map(|pod| (pod.id.clone(), pod.is_builtin())).collect();
        let network = self.clone();
        self.blocking("networks of pods", LIMIT, move || {
            let linked = pod_link::linked().map_err(|e| NetworkError::kernel("links of pods", e))?;
            let is_lost = |(id, is_builtin): &(String, bool)| {
                (*is_builtin && !linked.contains(id)) || !net_namespace::is_bound(&network.namespace_file(id))
            };
            Ok(looked.into_iter().filter(is_lost).map(|(id, _)| id).collect())
        })
        .await
    }

    /// Changes whenever a link or the file of a namespace went that may have been a pod's.
    pub fn disturbances(&self) -> watch::Receiver<u64> {
        self.inner.disturbances.subscribe()
    }

    pub(super) fn disturb(&self) {
        self.inner.disturbances.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Connects to a port inside a pod, by the file that names its network namespace; on the machine itself where the pod has
    /// none of its own.
    ///
    /// # Errors
    /// What the pod's loopback said, for both versions, or that the file names no namespace.
    pub async fn dial(&self, netns: Option<&Path>, sandbox: &str, port: u16) -> Result<TcpStream, NetworkError> {
        let (id, netns) = (sandbox.to_owned(), netns.map(Path::to_owned));
        let make = move || {
            let failed = |e| NetworkError::kernel(format!("network namespace of {id}"), e);
            let namespace = netns.map(|file| net_namespace::open_file(&file)).transpose().map_err(failed)?;
            dial::sockets(namespace.as_ref().map(AsFd::as_fd)).map_err(failed)
        };
        let sockets = self.blocking("sockets in a pod", LIMIT, make).await?;
        dial::connect(sockets, sandbox, port).await
    }

    /// Addresses that are leased: of version 4 and of version 6.
    pub fn leased(&self) -> (usize, usize) {
        self.inner.builtin.leased()
    }

    /// Times the packet filter was put in place again because somebody had removed it.
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

impl Inner {
    fn namespace_file(&self, sandbox: &str) -> PathBuf {
        let named = |name: String| self.namespaces.join(name);
        let file = named(self.files.name(sandbox));
        // A pod that an earlier version made keeps its file.
        let untagged = (!file.exists()).then(|| named(self.files.untagged(sandbox))).filter(|file| file.exists());
        untagged.unwrap_or(file)
    }
}

fn request(pod: &SandboxNetwork, netns: PathBuf) -> Result<Request, NetworkError> {
    Ok(Request { sandbox: pod.id.clone(), netns, args: pod.plugin_args(), known: pod.plugin_knowledge()? })
}

fn unbind(file: &Path) -> Result<(), NetworkError> {
    net_namespace::unbind_file(file)
        .map_err(|e| NetworkError::kernel(format!("network namespace {}", file.display()), e))
}
