//! Gathers the inputs of sandbox and container configurations and builds them.
//!
//! ```text
//!  pod, volumes, image ─┐                         ┌─► environment (objects, env files)
//!  node, runtime facts ─┼─► Preparer ─► decide ──►┼─► user namespace
//!  resource tuning ─────┘   (request/, pure)      └─► files (logs, hosts, termination, sub-paths)
//! ```
//!
//! All inputs are read on demand. File work runs on the blocking pool, one job per container, except
//! work inside volumes (`dedicated_thread.rs`); every wait has a timeout. Implements spec 03a §5-6.

mod dedicated_thread;
mod environment;
mod files;

use std::{net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::sync::watch;
use tracing::warn;

use self::{
    dedicated_thread::VolumeThreads,
    files::{ContainerFiles, HostsFile},
};
use super::{
    config_preparation::{ContainerRequest, PodLinuxResources, Prepare, PrepareError, SandboxRequest},
    request::{
        container::{self, ContainerParts},
        dns::{self, DnsSettings, HostDns},
        hosts,
        mounts::{self, MountInputs, PlannedMount, Volume},
        resources::{self, Cpus, ResourceInputs},
        sandbox::{self, SandboxParts},
        security::{self, ImageAccount, SecurityInputs},
        userns::{self, HostIds},
    },
};
use berth_ports::{
    ContainerTuning, EventRecord, EventSink, HandlerFeatures, ImageUser, NodeFacts, ObjectSource, PodClaims,
    PodDevices, ResourceManager, RuntimeState, UserNamespaces,
};
use berth_proto::cri;
use berth_types::{
    ContainerKind, Pod, api, expansion::Variables, fieldpath::NodeAddresses, hostname::HostName,
    observation::ObservedContainer,
};

/// Timeout for local files, objects, and ID assignment. Objects wait for their watch to catch up.
const LIMIT: Duration = Duration::from_secs(60);

/// Settings of the preparer.
#[derive(Clone, Debug)]
pub struct PreparerConfig {
    /// `--root-dir`.
    pub root_dir: PathBuf,
    /// `podLogsDir`.
    pub pod_logs_dir: PathBuf,
    /// `resolvConf`; `None` for `""`.
    pub resolv_conf: Option<PathBuf>,
    /// The node's hosts file: `/etc/hosts`.
    pub node_hosts_file: PathBuf,
    /// `clusterDNS`.
    pub cluster_dns: Vec<String>,
    /// `clusterDomain`; `""` for none.
    pub cluster_domain: String,
    /// Node name for `spec.nodeName` in environment variables of pods whose spec has none.
    pub node_name: String,
    /// `seccompDefault`.
    pub seccomp_default: bool,
    /// Gate `ContainerStopSignals`.
    pub stop_signals: bool,
    /// Whether SELinux is enabled: `sys::machine::selinux_enabled`.
    pub selinux: bool,
    /// Paths masked besides the fixed ones: `sys::machine::thermal_throttle_paths`.
    pub machine_masked: Vec<String>,
    /// Machine facts that resource values depend on.
    pub machine: ResourceInputs,
}

/// Dependencies of the preparer.
pub struct PreparerDeps {
    /// Reads ConfigMaps, Secrets, and Services.
    pub objects: Arc<dyn ObjectSource>,
    /// Provides CPU sets.
    pub resources: Arc<dyn ResourceManager>,
    /// Provides devices of device plugins.
    pub devices: Arc<dyn PodDevices>,
    /// Provides devices of resource claims.
    pub claims: Arc<dyn PodClaims>,
    /// Assigns host ID ranges.
    pub user_namespaces: Arc<dyn UserNamespaces>,
    /// Recorder of events.
    pub events: Arc<dyn EventSink>,
    /// Facts about the node.
    pub node: watch::Receiver<Arc<NodeFacts>>,
    /// Latest state and features of the runtime.
    pub runtime: watch::Receiver<Arc<RuntimeState>>,
}

/// Builds configurations of sandboxes and containers: the implementation of [`Prepare`].
pub struct Preparer {
    config: PreparerConfig,
    deps: PreparerDeps,
    lone: VolumeThreads,
}

impl Preparer {
    /// Creates the preparer without reading anything.
    pub fn new(config: PreparerConfig, deps: PreparerDeps) -> Self {
        Self { config, deps, lone: VolumeThreads::default() }
    }

    /// Checks the node's resolv.conf once: records events `CheckLimitsForResolvConf` on the node.
    pub async fn check_resolv_conf(&self) {
        let Some(path) = self.config.resolv_conf.as_ref() else { return };
        let complaints = match self.host_dns().await {
            Ok(host) => {
                dns::check_host_file(&path.to_string_lossy(), &host.unwrap_or_default(), &self.config.cluster_domain)
            }
            Err(e) => vec![e.0],
        };
        for message in complaints {
            self.deps.events.record(EventRecord::node_warning("CheckLimitsForResolvConf", message));
        }
    }

    async fn host_dns(&self) -> Result<Option<HostDns>, PrepareError> {
        let Some(path) = self.config.resolv_conf.clone() else { return Ok(None) };
        let text = blocking("resolv.conf", move || files::read_limited(&path, dns::MAX_FILE)).await?;
        dns::parse(&String::from_utf8_lossy(&text)).map(Some).map_err(text_of)
    }

    async fn pod_dns(&self, pod: &Pod) -> Result<cri::DnsConfig, PrepareError> {
        let host = if dns::needs_host_file(pod) { self.host_dns().await? } else { None };
        let loopback = |ip: &IpAddr| if ip.is_ipv6() { "::1" } else { "127.0.0.1" }.to_owned();
        let settings = DnsSettings {
            cluster_dns: self.config.cluster_dns.clone(),
            cluster_domain: self.config.cluster_domain.clone(),
            loopback: self.deps.node.borrow().host_ips.iter().map(loopback).collect(),
        };
        let made = dns::of_pod(pod, &settings, host.as_ref());
        for warning in made.warnings {
            self.deps.events.record(EventRecord::warning(pod.id(), warning.reason, warning.message));
            if let Some(message) = warning.on_node {
                self.deps.events.record(EventRecord::node_warning(warning.reason, message));
            }
        }
        Ok(made.config)
    }

    /// The pod's host ID range; `None` for the node's user namespace.
    async fn host_ids(&self, pod: &Pod, handler: &str) -> Result<Option<HostIds>, PrepareError> {
        let supported = self.features(handler).user_namespaces;
        userns::check_support(pod, handler, supported).map_err(text_of)?;
        if !userns::is_wanted(pod) {
            return Ok(None);
        }
        let assigned = within("user namespace", self.deps.user_namespaces.assign(pod.uid())).await?;
        let range = assigned.map_err(|e| PrepareError(format!("user namespace: {e}")))?;
        Ok(Some(HostIds { first: range.first, length: range.length }))
    }

    fn features(&self, handler: &str) -> HandlerFeatures {
        self.deps.runtime.borrow().handlers.get(handler).copied().unwrap_or_default()
    }

    fn pod_directory(&self, pod: &Pod) -> Result<PathBuf, PrepareError> {
        Ok(self.config.root_dir.join("pods").join(file_name(pod.uid().as_str())?))
    }

    fn log_directory(&self, pod: &Pod) -> Result<PathBuf, PrepareError> {
        Ok(self.config.pod_logs_dir.join(file_name(&container::pod_log_directory(pod))?))
    }

    fn security(
        &self,
        request: &ContainerRequest<'_>,
        ids: Option<HostIds>,
    ) -> Result<cri::LinuxContainerSecurityContext, PrepareError> {
        let image = match &request.image.user {
            ImageUser::Uid(uid) => ImageAccount::Uid(*uid),
            ImageUser::Name(name) => ImageAccount::Name(name),
            ImageUser::Unset => ImageAccount::Uid(0),
        };
        let inputs = SecurityInputs {
            image,
            seccomp_root: &self.config.root_dir.join("seccomp"),
            seccomp_default: self.config.seccomp_default,
            volume_groups: &request.volumes.groups,
            machine_masked: &self.config.machine_masked,
            namespaces: security::namespaces(request.pod, request.target, userns::options(ids)),
        };
        security::of_container(request.pod, request.container, inputs).map_err(text_of)
    }

    fn planned_mounts(
        &self,
        request: &ContainerRequest<'_>,
        env: &Variables<'_>,
        id_mappings: &[cri::IdMapping],
    ) -> Result<Vec<PlannedMount>, PrepareError> {
        let inputs = MountInputs {
            volume: &|name| {
                let volume = request.volumes.by_name.get(name)?;
                Some(Volume {
                    host_path: volume.host_path.as_deref(),
                    image: request.volume_images.get(name),
                    read_only: volume.read_only,
                    relabel: volume.relabel,
                    sub_path_mode: volume.sub_path_mode,
                })
            },
            env,
            recursive_read_only: self.features(request.handler).recursive_read_only_mounts,
            selinux: self.config.selinux,
            id_mappings,
        };
        mounts::plan(request.container, &inputs).map_err(text_of)
    }

    /// Block volumes that the container gets as devices; one whose link is gone is omitted, as upstream
    /// does.
    async fn block_devices(&self, request: &ContainerRequest<'_>) -> Result<Vec<cri::Device>, PrepareError> {
        let known = |name: &str| {
            let device = request.volumes.devices.get(name)?;
            Some((device.host_path.clone(), device.read_only))
        };
        let mut devices = mounts::devices(request.container, &known).map_err(text_of)?;
        if !devices.is_empty() {
            devices = blocking("block volume links", move || {
                devices.retain(|device| std::fs::symlink_metadata(&device.host_path).is_ok());
                Ok(devices)
            })
            .await?;
        }
        Ok(devices)
    }

    /// The content of the hosts file, if the container gets one.
    fn hosts_file(&self, pod: &Pod, container: &api::Container, ips: &[IpAddr]) -> Result<HostsFile, PrepareError> {
        if !hosts::is_wanted(pod.is_host_network(), ips, container) {
            return Ok(HostsFile::None);
        }
        let aliases = pod.spec().host_aliases.clone().unwrap_or_default();
        if pod.is_host_network() {
            return Ok(HostsFile::Node { file: self.config.node_hosts_file.clone(), aliases });
        }
        let name = HostName::of(pod, &self.config.cluster_domain).map_err(text_of)?;
        Ok(HostsFile::Pod(hosts::of_pod(&name, ips, &aliases)))
    }

    async fn mounts(
        &self,
        request: &ContainerRequest<'_>,
        planned: Vec<PlannedMount>,
        ips: &[IpAddr],
        id_mappings: Vec<cri::IdMapping>,
    ) -> Result<Vec<cri::Mount>, PrepareError> {
        let (pod, container) = (request.pod, request.container);
        let log_directory = self.log_directory(pod)?.join(file_name(&container.name)?);
        let job = ContainerFiles {
            container: container.name.clone(),
            pod_directory: self.pod_directory(pod)?,
            log_directory,
            planned,
            hosts: self.hosts_file(pod, container, ips)?,
            message_path: container.termination_message_path.clone().unwrap_or_default(),
            selinux: self.config.selinux,
            id_mappings,
        };
        let what = "container files";
        if job.planned.iter().any(|mount| mount.sub_path.is_some()) {
            let whose = (pod.uid().clone(), container.name.clone());
            return self.lone.work(what, whose, move || job.make()).await;
        }
        blocking(what, move || job.make()).await
    }

    /// Adds what the container's devices require. Device plugins are called here, with deadlines of their own.
    async fn add_devices(
        &self,
        tuning: &mut ContainerTuning,
        pod: &Arc<Pod>,
        container: &api::Container,
    ) -> Result<(), PrepareError> {
        let devices = self.deps.devices.container_devices(pod, container).await.map_err(PrepareError)?;
        tuning.envs.extend(devices.envs);
        tuning.mounts.extend(devices.mounts);
        tuning.devices.extend(devices.devices);
        let claimed = self.deps.claims.cdi_devices(pod, container).map_err(PrepareError)?;
        tuning.cdi_devices.extend(claimed.into_iter().map(|name| cri::CdiDevice { name }));
        tuning.cdi_devices.extend(devices.cdi_devices);
        tuning.annotations.extend(devices.annotations);
        Ok(())
    }

    fn tuning(&self, pod: &Pod, kind: ContainerKind, container: &str) -> Result<ContainerTuning, PrepareError> {
        self.deps.resources.tuning(pod, kind, container).map_err(text_of)
    }
}

#[async_trait]
impl Prepare for Preparer {
    async fn sandbox(&self, request: SandboxRequest<'_>) -> Result<cri::PodSandboxConfig, PrepareError> {
        let pod = request.pod;
        let ids = self.host_ids(pod, request.handler).await?;
        let dns = self.pod_dns(pod).await?;
        let log_directory = self.log_directory(pod)?;
        let PodLinuxResources { resources, overhead } = self.pod_resources(pod);
        let config = sandbox::config(SandboxParts {
            pod,
            attempt: request.attempt,
            cluster_domain: &self.config.cluster_domain,
            log_directory: &log_directory,
            dns,
            cgroup_parent: request.cgroup_parent,
            userns: userns::options(ids),
            volume_groups: &[],
            resources,
            overhead,
        })
        .map_err(text_of)?;
        blocking("pod log directory", move || files::make_log_directory(&log_directory)).await?;
        Ok(config)
    }

    async fn container(&self, request: ContainerRequest<'_>) -> Result<cri::ContainerConfig, PrepareError> {
        let (pod, container) = (request.pod, request.container);
        let mut tuning = self.tuning(pod, request.kind, &container.name)?;
        self.add_devices(&mut tuning, pod, container).await?;
        let ids = self.host_ids(pod, request.handler).await?;
        let security = self.security(&request, ids)?;
        let facts = self.deps.node.borrow().clone();
        let ips = pod_ips(pod, request.pod_ips, &facts.host_ips);
        let at = NodeAddresses { node_name: &self.config.node_name, host_ips: &facts.host_ips, pod_ips: &ips };
        let env = self.environment(&request, &tuning.envs, at, &facts.allocatable).await?;
        let variables = Variables::new(env.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        let id_mappings = userns::mappings(ids);
        let planned = self.planned_mounts(&request, &variables, &id_mappings)?;
        let block = self.block_devices(&request).await?;
        let mut resources = resources::of_container(pod, container, cpus(&tuning), &self.config.machine);
        resources.cpuset_cpus.clone_from(&tuning.cpuset_cpus);
        resources.cpuset_mems.clone_from(&tuning.cpuset_mems);
        let mut mounts = tuning.mounts;
        mounts.extend(self.mounts(&request, planned, &ips, id_mappings).await?);
        container::config(ContainerParts {
            pod,
            container,
            restart_count: request.restart_count,
            image: &request.image.reference,
            env: &env,
            annotations: &tuning.annotations,
            mounts,
            devices: [tuning.devices, block].concat(),
            cdi_devices: tuning.cdi_devices,
            resources,
            security,
            stop_signals: self.config.stop_signals,
        })
        .map_err(text_of)
    }

    async fn restart_count(&self, pod: &Pod, container: &str, newest: Option<&ObservedContainer>) -> u32 {
        if let Some(newest) = newest {
            return u32::try_from(newest.restart_count).unwrap_or(0).saturating_add(1);
        }
        let listed = match (self.log_directory(pod), file_name(container)) {
            (Ok(directory), Ok(name)) => {
                let directory = directory.join(name);
                blocking("container log directory", move || files::file_names(&directory)).await
            }
            (Err(e), _) | (_, Err(e)) => Err(e),
        };
        match listed {
            Ok(names) => container::restart_count_of_logs(names.iter().map(String::as_str)),
            Err(e) => {
                // A count that is too low only reuses a log file; the container must start.
                warn!(pod = %pod.object_name(), containerName = container, err = %e, "Cannot calculate restartCount from the log directory");
                0
            }
        }
    }

    fn container_resources(&self, pod: &Pod, container: &api::Container) -> cri::LinuxContainerResources {
        let kind = pod.container(&container.name).map_or(ContainerKind::Ephemeral, |(kind, _)| kind);
        let tuning = self.tuning(pod, kind, &container.name).unwrap_or_default();
        resources::of_running_container(pod, container, cpus(&tuning), &self.config.machine)
    }

    fn pod_resources(&self, pod: &Pod) -> PodLinuxResources {
        PodLinuxResources {
            resources: resources::of_pod(pod, &self.config.machine),
            overhead: resources::of_overhead(pod, &self.config.machine),
        }
    }
}

fn cpus(tuning: &ContainerTuning) -> Cpus {
    if tuning.exclusive_cpus { Cpus::Exclusive } else { Cpus::Shared }
}

/// The addresses a container sees: the node's for host network, else the first of the node's preferred
/// IP family and the first of the other (spec 02b §6.1).
fn pod_ips(pod: &Pod, reported: &[IpAddr], host: &[IpAddr]) -> Vec<IpAddr> {
    if pod.is_host_network() && reported.is_empty() {
        return host.to_vec();
    }
    let prefer_v6 = host.first().is_some_and(IpAddr::is_ipv6);
    let first_of = |v6: bool| reported.iter().copied().find(move |ip| ip.is_ipv6() == v6);
    first_of(prefer_v6).into_iter().chain(first_of(!prefer_v6)).collect()
}

/// Validates untrusted text as one path component.
fn file_name(text: &str) -> Result<&str, PrepareError> {
    if matches!(text, "" | "." | "..") || text.contains(['/', '\0']) {
        return Err(PrepareError(format!("invalid file name {text:?}")));
    }
    Ok(text)
}

fn text_of(error: impl std::fmt::Display) -> PrepareError {
    PrepareError(error.to_string())
}

async fn within<T>(what: &str, wait: impl Future<Output = T>) -> Result<T, PrepareError> {
    tokio::time::timeout(LIMIT, wait).await.map_err(|_| PrepareError(format!("{what}: timed out after {LIMIT:?}")))
}

/// Runs file work on the blocking pool; on a timeout the job is abandoned and named in the error.
async fn blocking<T: Send + 'static>(
    what: &str,
    job: impl FnOnce() -> Result<T, PrepareError> + Send + 'static,
) -> Result<T, PrepareError> {
    let done = within(what, tokio::task::spawn_blocking(job)).await?;
    done.map_err(|e| PrepareError(format!("{what}: {e}")))?
}
