//! Launch planner for this host: resolves what a request names, then builds the plan.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use tokio::{runtime::Handle, task::spawn_blocking, time::timeout};

use crate::{
    cri::sandbox_files,
    errors::{ErrorKind, RuntimeError, RuntimeResult},
    ids,
    images::ImageStore,
    launch::{
        self, Host, LaunchError, LaunchErrorKind, LaunchInputs, MountSource, ResolvedResources, Sandbox,
        TargetContainer, resolver,
    },
    ports::{ContainerPlanRequest, PlannedContainer, Planner},
    store::{self, Layout},
};
use berth_proto::cri;
use berth_shim::plan::{ExecPlan, LaunchPlan, MountKind, NamespacePlan, Root, RootKind};

/// Timeout of resolving what a request names: a dead file system never responds.
const FIND_LIMIT: Duration = Duration::from_secs(60);
/// Deadline for copying the content of image volumes: before `FIND_LIMIT`, so that no attempt overlaps the next one.
const COPY_LIMIT: Duration = Duration::from_secs(55);
/// Bundle directory for hooks, inside the container's directory.
const BUNDLE: &str = "bundle";
/// Timeout of a container start, milliseconds.
const START_LIMIT_MS: u64 = 60_000;

/// The `Planner` port for this host.
#[derive(Clone)]
pub struct HostPlanner {
    /// Properties of the host.
    pub host: Host,
    /// Host name of the node.
    pub hostname: String,
    /// Directory layout.
    pub layout: Layout,
    /// CDI spec directories.
    pub cdi: Vec<PathBuf>,
    /// Maximum length of a log record in bytes; 0: no limit.
    pub longest_record: usize,
    /// The image store.
    pub images: ImageStore,
}

#[async_trait]
impl Planner for HostPlanner {
    fn namespaces(&self, pod: &cri::PodSandboxConfig) -> RuntimeResult<NamespacePlan> {
        Ok(launch::namespaces(pod, self.hostname(pod), &self.host)?)
    }

    async fn container(&self, ask: ContainerPlanRequest) -> RuntimeResult<PlannedContainer> {
        let (plans, runtime) = (self.clone(), Handle::current());
        let name = ask.config.metadata.as_ref().map(|meta| meta.name.clone()).unwrap_or_default();
        let copied_by = Instant::now() + COPY_LIMIT;
        let planning = spawn_blocking(move || plans.plan(&ask, &runtime, copied_by));
        match timeout(FIND_LIMIT, planning).await {
            Ok(planned) => planned.map_err(|error| RuntimeError::other(error.to_string()))?,
            Err(_) => Err(RuntimeError::deadline(format!(
                "resolving mounts of container \"{name}\" timed out after {FIND_LIMIT:?}"
            ))),
        }
    }

    fn exec(&self, container: &LaunchPlan, exec: &str, args: &[String], terminal: bool) -> RuntimeResult<ExecPlan> {
        Ok(launch::exec(container, exec, args, terminal.then_some((80, 24)))?)
    }
}

impl HostPlanner {
    fn hostname<'a>(&'a self, pod: &'a cri::PodSandboxConfig) -> &'a str {
        if pod.hostname.is_empty() { &self.hostname } else { &pod.hostname }
    }

    /// Resolves and plans a container. Blocking.
    fn plan(
        &self,
        ask: &ContainerPlanRequest,
        runtime: &Handle,
        copied_by: Instant,
    ) -> RuntimeResult<PlannedContainer> {
        let (_, image) = self.images.image(&ask.image)?;
        let mut mounted = BTreeMap::new();
        let mut image_place = |mount: &cri::Mount| {
            let (place, image) = self.place(&ask.id, mount, runtime)?;
            mounted.insert(mount.container_path.clone(), image);
            Ok(place)
        };
        let found = resolver::resolve(&ask.config, &self.host, &self.cdi, &mut image_place)?;
        let found = ResolvedResources { volumes: self.volumes(ask, &image.config.volumes, copied_by)?, ..found };
        let kind = self.images.root_for(&ask.id);
        let kind =
            kind.ok_or_else(|| RuntimeError::other(format!("container \"{}\" has no root filesystem", ask.id)))?;
        let files = self.layout.sandbox(&ask.sandbox);
        let shm = match sandbox_files::has_host_ipc(&ask.pod) {
            true => PathBuf::from("/dev/shm"),
            false => self.layout.shared_memory(&ask.sandbox),
        };
        let target = ask.target.as_ref().map(|target| TargetContainer {
            id: &target.id,
            sandbox: &target.sandbox,
            state: &target.state,
            pid: target.pid,
        });
        let inputs = LaunchInputs {
            id: &ask.id,
            config: &ask.config,
            sandbox: Sandbox {
                id: &ask.sandbox,
                config: &ask.pod,
                hostname: self.hostname(&ask.pod),
                files: &files,
                shm: &shm,
            },
            image: &image,
            host: &self.host,
            found: &found,
            target,
            root: root(self.layout.stage(), kind),
            groups: Vec::new(),
            longest_record: self.longest_record,
            limit_ms: START_LIMIT_MS,
            bundle: self.layout.container(&ask.id).join(BUNDLE),
        };
        let launch = launch::launch(&inputs)?;
        if let Some(hooks) = &launch.plan.hooks {
            store::make_directory(&hooks.bundle, 0o700)?;
            let config = launch::bundle::config(&inputs, &launch.plan);
            let written = std::fs::write(hooks.bundle.join("config.json"), config.to_string());
            written.map_err(|error| RuntimeError::other(format!("write config.json for hooks: {error}")))?;
        }
        let process = &launch.plan.process;
        let user = (process.uid, process.gid, process.groups.clone());
        Ok(PlannedContainer { user, devices: launch.device_rules, plan: launch.plan, mounted })
    }

    /// Resolves an image volume to its layers, and returns the image's id.
    fn place(
        &self,
        container: &str,
        mount: &cri::Mount,
        runtime: &Handle,
    ) -> Result<(MountSource, String), LaunchError> {
        let name = mount.image.as_ref().map_or("", |image| image.image.as_str());
        let mounted = runtime.block_on(self.images.mount_image(container, name, &mount.image_sub_path));
        let refuse = |text: String| LaunchError::plain(format!("ImageVolumeMountFailed: {text}"));
        match mounted.map_err(|error| refuse(error.text))? {
            (record, MountKind::Layers { layers, lower, .. }) => {
                Ok((MountSource::Image { layers, lower }, record.id()))
            }
            (_, other) => Err(refuse(format!("{other:?} is not an image"))),
        }
    }

    /// Creates a directory for each volume of the image that no requested mount covers.
    fn volumes(
        &self,
        ask: &ContainerPlanRequest,
        wanted: &[String],
        copied_by: Instant,
    ) -> RuntimeResult<BTreeMap<String, PathBuf>> {
        let mut volumes = BTreeMap::new();
        if self.host.ignores_image_volumes {
            return Ok(volumes);
        }
        let is_mounted = |path: &str| {
            let plain = |path: &str| path.trim_end_matches('/').to_owned();
            ask.config.mounts.iter().any(|mount| plain(&mount.container_path) == plain(path))
        };
        for path in wanted.iter().filter(|path| !is_mounted(path)) {
            let directory = self.layout.volumes(&ask.id).join(ids::new_id());
            store::make_directory(&directory, 0o755)?;
            self.images.fill_volume(&ask.image, path, &directory, copied_by)?;
            volumes.insert(path.clone(), directory);
        }
        Ok(volumes)
    }
}

fn root(stage: PathBuf, kind: RootKind) -> Root {
    Root { stage, kind, is_read_only: false, is_shared: false }
}

impl From<LaunchError> for RuntimeError {
    fn from(refusal: LaunchError) -> Self {
        let kind = match refusal.kind {
            LaunchErrorKind::InvalidArgument => ErrorKind::Invalid,
            LaunchErrorKind::NotFound => ErrorKind::NotFound,
            LaunchErrorKind::FailedPrecondition => ErrorKind::State,
            LaunchErrorKind::Unimplemented => ErrorKind::Unimplemented,
            LaunchErrorKind::Unknown => ErrorKind::Other,
        };
        RuntimeError::new(kind, refusal.text)
    }
}
