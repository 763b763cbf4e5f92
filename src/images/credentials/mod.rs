//! Image pull credentials: pull secrets, the node's Docker configuration, exec plugins (spec 03b §2).
//!
//! The pure part (documents, matching, hashes, plugin configuration) is separate from the part that
//! reads files and runs plugins. Credentials are never printed.

pub mod docker;
pub mod glob;
pub mod hash;
mod node;
mod plugin;
pub mod plugin_api;
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

use super::record_documents::{AccountRecord, Proof, SecretRecord};
use berth_metrics::Registry;
use berth_ports::{ObjectSource, PullSecret};
use berth_proto::cri;
use berth_types::Pod;

/// Source of a login.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CredentialSource {
    /// A pull secret of the pod.
    Secret {
        /// Namespace of the Secret.
        namespace: String,
        /// Name of the Secret.
        name: String,
        /// UID of the Secret.
        uid: String,
    },
    /// The node: its Docker configuration, or a plugin called without a service account.
    Node,
    /// A plugin called with a service account's token.
    Account(AccountRecord),
}

/// A login to try for an image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Credential {
    /// User name and password.
    pub login: Login,
    /// Source of the login.
    pub source: CredentialSource,
}

impl Credential {
    /// What a successful pull with this credential proves.
    pub fn proof(&self) -> Proof {
        match &self.source {
            CredentialSource::Node => Proof::Node,
            CredentialSource::Account(account) => Proof::Account(account.clone()),
            CredentialSource::Secret { namespace, name, uid } => Proof::Secret(SecretRecord {
                uid: uid.clone(),
                namespace: namespace.clone(),
                name: name.clone(),
                hash: credential_hash(&self.login),
            }),
        }
    }

    /// Converts to the CRI type.
    pub fn auth(&self) -> cri::AuthConfig {
        cri::AuthConfig {
            username: self.login.username.clone(),
            password: self.login.password.clone(),
            ..Default::default()
        }
    }
}

/// All sources of credentials.
pub struct CredentialLookup {
    node: NodeLogins,
    plugins: Plugins,
}

impl CredentialLookup {
    /// Reads the configuration of plugins only.
    ///
    /// # Errors
    /// The plugin configuration is invalid.
    pub async fn open(
        folders: DockerFolders,
        plugins: Option<PluginFlags>,
        registry: &Registry,
        objects: Option<Arc<dyn ObjectSource>>,
    ) -> Result<Self, PluginConfigError> {
        Ok(Self { node: NodeLogins::new(folders), plugins: Plugins::open(plugins, registry, objects).await? })
    }

    /// The logins to try for a normalized repository, in order: the pod's secrets, the node's
    /// configuration, plugins.
    ///
    /// # Errors
    /// A secret is malformed.
    pub async fn find(
        &self,
        pod: &Pod,
        repository: &str,
        secrets: &[PullSecret],
    ) -> Result<Arc<[Credential]>, DockerConfigError> {
        let mut found = secrets::keyring(secrets)?.find(repository);
        let mut node = Keyring::default();
        node.add(&*self.node.get().await, &CredentialSource::Node);
        found.extend(node.find(repository));
        found.extend(self.plugins.find(repository, pod).await);
        Ok(found.into_iter().map(|(login, source)| Credential { login, source }).collect())
    }
}
