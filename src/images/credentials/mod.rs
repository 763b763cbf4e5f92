//! Who may pull what: pull secrets, the node's docker configuration, exec plugins (spec 03b §2).
//!
//! The pure half (documents, matching, hashes, plugin configuration) is apart from the half
//! that reads files and runs plugins. Nothing here is ever printed.

pub mod docker;
pub mod glob;
pub mod hash;
mod node;
mod plugin;
pub mod plugin_answer;
mod plugin_cache;
pub mod plugin_caller;
pub mod plugin_config;
mod plugins;
mod secrets;

use std::sync::Arc;

use docker::{DockerConfigError, Keyring, Login};
use hash::credential_hash;
pub use node::DockerFolders;
use node::NodeLogins;
pub use plugin_config::PluginConfigError;
pub use plugins::PluginFlags;
use plugins::Plugins;

use super::record::{AccountRecord, Proof, SecretRecord};
use berth_metrics::Registry;
use berth_ports::{ObjectSource, PullSecret};
use berth_proto::cri;
use berth_types::Pod;

/// Where a login came from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Source {
    /// A pull secret of the pod.
    Secret {
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
        /// UID.
        uid: String,
    },
    /// The node: its docker configuration, or a plugin that knows of no pod.
    Node,
    /// A plugin that was given a service account's token.
    Account(AccountRecord),
}

/// A login that may be tried for an image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Credential {
    /// User and password.
    pub login: Login,
    /// Where it came from.
    pub source: Source,
}

impl Credential {
    /// What a success with it proves.
    pub fn proof(&self) -> Proof {
        match &self.source {
            Source::Node => Proof::Node,
            Source::Account(account) => Proof::Account(account.clone()),
            Source::Secret { namespace, name, uid } => Proof::Secret(SecretRecord {
                uid: uid.clone(),
                namespace: namespace.clone(),
                name: name.clone(),
                hash: credential_hash(&self.login),
            }),
        }
    }

    /// As the runtime takes it.
    pub fn auth(&self) -> cri::AuthConfig {
        cri::AuthConfig {
            username: self.login.username.clone(),
            password: self.login.password.clone(),
            ..Default::default()
        }
    }
}

/// Everything that knows logins.
pub struct Credentials {
    node: NodeLogins,
    plugins: Plugins,
}

impl Credentials {
    /// Reads the configuration of plugins, and nothing else yet.
    ///
    /// # Errors
    /// Where that configuration cannot be used.
    pub async fn open(
        folders: DockerFolders,
        plugins: Option<PluginFlags>,
        registry: &Registry,
        objects: Option<Arc<dyn ObjectSource>>,
    ) -> Result<Self, PluginConfigError> {
        Ok(Self { node: NodeLogins::new(folders), plugins: Plugins::open(plugins, registry, objects).await? })
    }

    /// The logins to try for a normalised repository, in order: the pod's secrets, the node's
    /// configuration, plugins.
    ///
    /// # Errors
    /// Where a secret is malformed.
    pub async fn find(
        &self,
        pod: &Pod,
        repository: &str,
        secrets: &[PullSecret],
    ) -> Result<Arc<[Credential]>, DockerConfigError> {
        let mut found = secrets::keyring(secrets)?.find(repository);
        let mut node = Keyring::default();
        node.add(&*self.node.get().await, &Source::Node);
        found.extend(node.find(repository));
        found.extend(self.plugins.find(repository, pod).await);
        Ok(found.into_iter().map(|(login, source)| Credential { login, source }).collect())
    }
}
