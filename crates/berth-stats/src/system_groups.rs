//! System cgroups of the summary: `kubelet`, `runtime`, `misc`, and `pods`.
//!
//! Cgroups that are not configured are detected, and detected again after [`AGE`], because the runtime may have been
//! restarted. Blocks, but only on kernel files. Implements spec 04b §7.2.

use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use super::{config::StatsConfig, host, snapshot::SystemGroup};

/// Maximum age of the detected cgroups.
const AGE: Duration = Duration::from_secs(60);

/// Detects and caches the system cgroups.
pub struct SystemGroups {
    root: PathBuf,
    booted_at: i64,
    kubelet: String,
    runtime: String,
    runtime_process: String,
    misc: String,
    pods: Option<String>,
    found: Mutex<Option<(Instant, Vec<SystemGroup>)>>,
}

impl SystemGroups {
    /// Creates the detector from the configuration; `pods` is the cgroup of all pods.
    pub fn new(config: &StatsConfig, pods: Option<String>) -> Self {
        Self {
            root: config.root.clone(),
            booted_at: config.host.booted_at,
            kubelet: config.kubelet_group.clone(),
            runtime: config.runtime_group.clone(),
            runtime_process: config.runtime_process.clone(),
            misc: config.system_group.clone(),
            pods,
            found: Mutex::default(),
        }
    }

    /// Returns the existing system cgroups, sorted by name.
    pub fn all(&self) -> Vec<SystemGroup> {
        if let Some((at, groups)) = &*self.found.lock().unwrap_or_else(PoisonError::into_inner)
            && at.elapsed() < AGE
        {
            return groups.clone();
        }
        let groups = self.find();
        *self.found.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), groups.clone()));
        groups
    }

    fn find(&self) -> Vec<SystemGroup> {
        let runtime = host::process_named(&self.root, &self.runtime_process).map(|pid| pid.to_string());
        let groups = [
            self.group("kubelet", &self.kubelet, Some("self")),
            self.group("misc", &self.misc, None),
            self.group("pods", self.pods.as_deref().unwrap_or_default(), None),
            self.group("runtime", &self.runtime, runtime.as_deref()),
        ];
        groups.into_iter().flatten().collect()
    }

    /// Returns the configured cgroup, or that of the process unless it is the root cgroup.
    fn group(&self, name: &'static str, configured: &str, process: Option<&str>) -> Option<SystemGroup> {
        let configured = Some(configured).filter(|path| !path.is_empty()).map(str::to_owned);
        let path = configured.or_else(|| host::group_of(&self.root, process?))?;
        let started_at = process.and_then(|process| host::process_start(&self.root, process, self.booted_at));
        Some(SystemGroup { name, path: path.into(), started_at })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn groups_are_configured_or_detected() {
        let root = tempfile::tempdir().expect("a directory");
        let lay = |process: &str, group: &str, name: &str| {
            let folder = root.path().join("proc").join(process);
            fs::create_dir_all(&folder).expect("made");
            fs::write(folder.join("cgroup"), format!("0::{group}\n")).expect("written");
            fs::write(folder.join("comm"), format!("{name}\n")).expect("written");
            let fields = ["0"; 18].join(" ");
            fs::write(folder.join("stat"), format!("1 (a b) S {fields} 500 0\n")).expect("written");
        };
        lay("self", "/", "berth");
        lay("70", "/system.slice/runtime.service", "containerd");
        let config = StatsConfig {
            root: root.path().to_owned(),
            runtime_process: "containerd".to_owned(),
            system_group: "/system.slice".to_owned(),
            ..StatsConfig::default()
        };
        let groups = SystemGroups::new(&config, Some("/kubepods".to_owned()));
        let shown: Vec<String> =
            groups.all().iter().map(|g| format!("{} {} {:?}", g.name, g.path, g.started_at)).collect();
        assert_eq!(
            shown,
            ["misc /system.slice None", "pods /kubepods None", "runtime /system.slice/runtime.service Some(5)"]
        );
    }
}
