//! Default requests and facts for the table tests of `launch`.

use std::path::{Path, PathBuf};

use super::{
    image::LaunchImage,
    inputs::{Groups, Host, LaunchInputs, ResolvedResources, Sandbox},
};
use crate::seccomp::CpuArchitecture;
use berth_proto::cri;
use berth_shim::plan::{Root, RootKind};

/// Sandbox id in [`Facts::inputs`].
pub const SANDBOX: &str = "sandbox-1";

/// A host that supports every feature except AppArmor and SELinux.
pub fn host() -> Host {
    Host {
        kernel: (6, 12),
        machine: CpuArchitecture::X86_64,
        capabilities: (1 << 41) - 1,
        has_seccomp: true,
        has_spec_allow: true,
        has_apparmor: false,
        has_selinux: false,
        groups: Groups::V2 { options: "nsdelegate".to_owned() },
        has_recursive_read_only: true,
        has_user_namespaces: true,
        least_oom_score_adj: None,
        limits: vec![(7, 1024, 524_288)],
        owns_devices: false,
        ignores_image_volumes: false,
        unprivileged_ports: true,
        unprivileged_icmp: true,
        allows_32_bit: false,
    }
}

/// A minimal sandbox request.
pub fn sandbox_config() -> cri::PodSandboxConfig {
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata { name: "p".to_owned(), ..Default::default() }),
        log_directory: "/var/log/pods/p".to_owned(),
        ..Default::default()
    }
}

/// A minimal container request: only a command.
pub fn container_config() -> cri::ContainerConfig {
    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: "c".to_owned(), attempt: 0 }),
        command: vec!["/bin/true".to_owned()],
        log_path: "c/0.log".to_owned(),
        ..Default::default()
    }
}

/// Launch inputs other than the requests.
pub struct Facts {
    /// Properties of the host; by default those of [`host()`].
    pub host: Host,
    /// The resolved resources.
    pub found: ResolvedResources,
    /// Image data; empty by default.
    pub image: LaunchImage,
}

impl Default for Facts {
    fn default() -> Self {
        Self { host: host(), found: ResolvedResources::default(), image: LaunchImage::default() }
    }
}

impl Facts {
    /// All inputs for a container.
    pub fn inputs<'a>(
        &'a self,
        config: &'a cri::ContainerConfig,
        sandbox: &'a cri::PodSandboxConfig,
    ) -> LaunchInputs<'a> {
        let root = Root {
            stage: PathBuf::from("/run/stage"),
            kind: RootKind::Directory(PathBuf::from("/r")),
            is_read_only: false,
            is_shared: false,
        };
        LaunchInputs {
            id: "container-1",
            config,
            sandbox: Sandbox {
                id: SANDBOX,
                config: sandbox,
                hostname: "h",
                files: Path::new("/s"),
                shm: Path::new("/s/shm"),
            },
            image: &self.image,
            host: &self.host,
            found: &self.found,
            target: None,
            root,
            groups: vec![PathBuf::from("/sys/fs/cgroup/g")],
            longest_record: 16_384,
            limit_ms: 60_000,
            bundle: PathBuf::from("/bundle"),
        }
    }
}
