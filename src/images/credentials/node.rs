//! The node's own Docker configuration (spec 03b §2.2), re-read at most every 5 minutes.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, timeout};
use tracing::{debug, warn};

use super::docker::{DockerConfig, DockerConfigError, parse_config_json, parse_dockercfg};

const KEEP: Duration = Duration::from_secs(300);
const DEADLINE: Duration = Duration::from_secs(10);

/// Directories to search for Docker configurations.
#[derive(Clone, Debug, Default)]
pub struct DockerFolders {
    /// The agent's root directory.
    pub root: PathBuf,
    /// The working directory; `None` if it cannot be determined.
    pub working: Option<PathBuf>,
    /// `$HOME`.
    pub home: Option<PathBuf>,
}

type Parse = fn(&[u8]) -> Result<DockerConfig, DockerConfigError>;

impl DockerFolders {
    /// Candidate files in order: the first valid one is used.
    fn files(&self) -> Vec<(PathBuf, Parse)> {
        let folders = |home: Option<PathBuf>, last: &str| {
            [Some(self.root.clone()), self.working.clone(), home, Some(PathBuf::from(last))].into_iter().flatten()
        };
        let docker_home = self.home.as_ref().map(|home| home.join(".docker"));
        let new = folders(docker_home, "/.docker").map(|f| (f.join("config.json"), parse_config_json as Parse));
        let old = folders(self.home.clone(), "/").map(|f| (f.join(".dockercfg"), parse_dockercfg as Parse));
        new.chain(old).collect()
    }
}

/// Cached logins of the node.
pub struct NodeLogins {
    folders: DockerFolders,
    read: Mutex<Option<(Instant, Arc<DockerConfig>)>>,
}

impl NodeLogins {
    /// Creates the cache without reading any file.
    pub fn new(folders: DockerFolders) -> Self {
        Self { folders, read: Mutex::new(None) }
    }

    /// The first valid configuration; empty without one.
    pub async fn get(&self) -> Arc<DockerConfig> {
        let known = self.read.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((at, config)) = known
            && at.elapsed() < KEEP
        {
            return config;
        }
        let config = match timeout(DEADLINE, read(self.folders.files())).await {
            Ok(config) => Arc::new(config),
            Err(_) => {
                warn!("Timed out reading the node's docker configuration");
                Arc::default()
            }
        };
        *self.read.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), config.clone()));
        config
    }
}

async fn read(files: Vec<(PathBuf, Parse)>) -> DockerConfig {
    for (path, parse) in files {
        // most of these files do not exist
        let Ok(data) = tokio::fs::read(&path).await else { continue };
        match parse(&data) {
            Ok(config) => {
                debug!(path = %path.display(), "Docker configuration found");
                return config;
            }
            Err(error) => warn!(path = %path.display(), err = %error, "Docker configuration is malformed"),
        }
    }
    DockerConfig::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_first_valid_file_counts_for_five_minutes() {
        let dir = tempfile::tempdir().expect("a directory");
        let (root, home) = (dir.path().join("root"), dir.path().join("home"));
        std::fs::create_dir_all(&root).expect("made");
        std::fs::create_dir_all(home.join(".docker")).expect("made");
        std::fs::write(root.join("config.json"), "junk").expect("written");
        let config = |user: &str| format!("{{\"auths\":{{\"r.io\":{{\"username\":\"{user}\"}}}}}}");
        std::fs::write(home.join(".docker/config.json"), config("home")).expect("written");
        let node = NodeLogins::new(DockerFolders { root: root.clone(), working: None, home: Some(home) });
        let user = async || node.get().await.get("r.io").map(|login| login.username.clone());
        assert_eq!(user().await.as_deref(), Some("home"));
        std::fs::write(root.join("config.json"), config("root")).expect("written");
        assert_eq!(user().await.as_deref(), Some("home"));
        tokio::time::advance(KEEP).await;
        assert_eq!(user().await.as_deref(), Some("root"));
    }
}
