//! Adds pods to the configured CNI network and removes them.
//!
//! Implements spec 09b §13.

use std::{
    collections::BTreeMap,
    fs,
    net::IpAddr,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use serde_json::{Map, Value, json};
use tokio::time::sleep;
use tracing::{info, warn};

use super::{
    cache::{self, Attachment},
    config::{self, CniNetwork},
    plugin_runner::{CniCommand, CniRuntimeConf, PluginError, PluginRunner},
    result,
};
use crate::network::{
    mode,
    names::{self, NamespaceFiles},
};

/// Back-off before each retry of a transient failure.
const RETRIES: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(4)];
/// Minimum number and duration of DEL failures, for a pod whose namespace is gone, before it counts as leaked.
const LEAKED: (u32, Duration) = (3, Duration::from_secs(30));
/// Maximum number of pods with a failure counter.
const COUNTED: usize = 1024;

/// CNI arguments of a pod.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CniRequest {
    /// Sandbox id.
    pub sandbox: String,
    /// Path of its network namespace.
    pub netns: PathBuf,
    /// `CNI_ARGS`, in order.
    pub args: Vec<(String, String)>,
    /// Runtime configuration by capability.
    pub known: Map<String, Value>,
}

/// The CNI plugin network.
#[derive(Debug)]
pub struct Plugins {
    /// Identifies the attachments that belong to this runtime.
    files: NamespaceFiles,
    directory: PathBuf,
    cache: PathBuf,
    caller: PluginRunner,
    state: Mutex<PluginState>,
}

#[derive(Debug)]
struct PluginState {
    loaded: Result<Arc<CniNetwork>, String>,
    has_file: bool,
    failures: BTreeMap<String, (u32, Instant)>,
}

impl Plugins {
    /// Loads the configuration once; see [`Self::reload`].
    pub fn new(
        files: NamespaceFiles,
        directory: PathBuf,
        programs: Vec<PathBuf>,
        cache: PathBuf,
        limit: Duration,
    ) -> Self {
        let state = PluginState { loaded: Err(String::new()), has_file: false, failures: BTreeMap::new() };
        let caller = PluginRunner { directories: programs, limit };
        let plugins = Self { files, directory, cache, caller, state: Mutex::new(state) };
        plugins.reload();
        plugins
    }

    /// Configuration directory.
    pub fn directory(&self) -> &PathBuf {
        &self.directory
    }

    /// Reloads the configuration. Blocking: a directory and a small file.
    pub fn reload(&self) {
        let (has_file, loaded) = self.read();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &loaded {
            Ok(network) if state.loaded.as_ref().ok() != Some(network) => {
                info!(network = %network.name, "Loaded CNI configuration");
            }
            Err(e) if state.loaded.as_ref().err() != Some(e) && has_file => {
                warn!(err = %e, "Failed to load CNI configuration")
            }
            _ => {}
        }
        (state.has_file, state.loaded) = (has_file, loaded);
    }

    fn read(&self) -> (bool, Result<Arc<CniNetwork>, String>) {
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let names = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        let Some(name) = config::first(names) else {
            return (false, Err(mode::no_plugins(&self.directory.display().to_string())));
        };
        let text = fs::read_to_string(self.directory.join(&name));
        let parsed = text.map_err(|e| format!("failed to load CNI config {name}: {e}"));
        (true, parsed.and_then(|text| config::parse(&name, &text)).map(Arc::new))
    }

    /// Whether a configuration file exists, valid or not.
    pub fn has_file(&self) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).has_file
    }

    /// Whether the cache contains a sandbox, added or attempted. Blocking: reads a directory.
    pub fn has_attachment(&self, sandbox: &str) -> bool {
        !cache::of(&self.cache, sandbox).is_empty()
    }

    /// The network for new pods.
    ///
    /// # Errors
    /// The reason why no configuration is loaded.
    pub fn network(&self) -> Result<Arc<CniNetwork>, String> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).loaded.clone()
    }

    /// Checks that pods can be added: a configuration is loaded, and plugins that support STATUS report ready.
    ///
    /// # Errors
    /// The reason why not.
    pub async fn status(&self) -> Result<(), String> {
        let network = self.network()?;
        if !config::has_status(&network.version) {
            return Ok(());
        }
        for plugin in &network.plugins {
            let input = config::input(&network, plugin, &Map::new(), None);
            let outcome =
                self.caller.call(config::kind(plugin), CniCommand::Status, &CniRuntimeConf::default(), &input).await;
            outcome.map_err(|e| e.text)?;
        }
        Ok(())
    }

    /// Adds a pod. Returns its addresses and the last plugin's result, converted to version 1.0.0. A pod whose ADD
    /// fails is removed again.
    ///
    /// # Errors
    /// A plugin's error, or that no plugin returned an address.
    pub async fn add(&self, request: &CniRequest) -> Result<(Vec<IpAddr>, Value), String> {
        let network = self.network()?;
        let netns = request.netns.display().to_string();
        let mut attachment = Attachment::new(&network, &request.sandbox, &netns, names::POD_LINK);
        attachment.cni_args.clone_from(&request.args);
        attachment.capability_args.clone_from(&request.known);
        // Saved before the first plugin call, so that recovery after a crash finds what the plugin created.
        attachment.save(&self.cache).map_err(|e| format!("CNI cache: {e}"))?;
        match self.add_all(&network, &mut attachment).await {
            Ok(added) => Ok(added),
            Err(text) => {
                // Plugins that were never called may fail to delete what they never created.
                match self.del_all(&network, &attachment).await {
                    Err(e) => {
                        info!(podSandboxID = %request.sandbox, err = %e.text, "CNI DEL after failed ADD returned an error")
                    }
                    Ok(()) => attachment.remove(&self.cache).unwrap_or_default(),
                }
                Err(text)
            }
        }
    }

    async fn add_all(&self, network: &CniNetwork, attachment: &mut Attachment) -> Result<(Vec<IpAddr>, Value), String> {
        for plugin in &network.plugins {
            let input = config::input(network, plugin, &attachment.capability_args, attachment.result.as_ref());
            let answer = self.call(plugin, CniCommand::Add, attachment, &input).await.map_err(|e| e.text)?;
            attachment.result = answer;
        }
        attachment.save(&self.cache).map_err(|e| format!("CNI cache: {e}"))?;
        let answer = attachment.result.clone().unwrap_or_default();
        let addresses = result::addresses(&answer, names::POD_LINK);
        if addresses.is_empty() {
            return Err(format!("failed to find network info for sandbox {:?}", attachment.container_id));
        }
        Ok((addresses, result::converted(answer)))
    }

    /// Removes a pod with the configuration of its ADD; a pod without a cache entry, with the current configuration if
    /// one is loaded.
    ///
    /// # Errors
    /// A plugin's error. After several failures, a pod whose namespace is gone counts as removed.
    pub async fn del(&self, request: &CniRequest) -> Result<(), String> {
        let mut attachments = cache::of(&self.cache, &request.sandbox);
        if attachments.is_empty()
            && let Ok(network) = self.network()
        {
            let mut unknown = Attachment::new(&network, &request.sandbox, "", names::POD_LINK);
            unknown.cni_args.clone_from(&request.args);
            unknown.capability_args.clone_from(&request.known);
            attachments.push(unknown);
        }
        let has_namespace = berth_sys::net_namespace::is_bound(&request.netns);
        for mut attachment in attachments {
            attachment.netns = if has_namespace { request.netns.display().to_string() } else { String::new() };
            self.del_one(&attachment, has_namespace).await?;
        }
        self.state.lock().unwrap_or_else(PoisonError::into_inner).failures.remove(&request.sandbox);
        Ok(())
    }

    async fn del_one(&self, attachment: &Attachment, has_namespace: bool) -> Result<(), String> {
        let deleted = match attachment.network() {
            Ok(network) => self.del_all(&network, attachment).await.map_err(|e| e.text),
            Err(text) => Err(text),
        };
        if let Err(text) = deleted {
            if has_namespace || !self.is_leaked(&attachment.container_id) {
                return Err(text);
            }
            warn!(podSandboxID = %attachment.container_id, err = %text, "CNI DEL keeps failing for a deleted pod, leaking its attachment");
        }
        attachment.remove(&self.cache).map_err(|e| format!("CNI cache: {e}"))
    }

    fn is_leaked(&self, sandbox: &str) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        counts_as_leaked(&mut state.failures, sandbox, Instant::now())
    }

    async fn del_all(&self, network: &CniNetwork, attachment: &Attachment) -> Result<(), PluginError> {
        let previous = attachment.result.as_ref().filter(|_| config::passes_result_on_del(&network.version));
        for plugin in network.plugins.iter().rev() {
            let input = config::input(network, plugin, &attachment.capability_args, previous);
            self.call(plugin, CniCommand::Del, attachment, &input).await?;
        }
        Ok(())
    }

    async fn call(
        &self,
        plugin: &Map<String, Value>,
        verb: CniCommand,
        attachment: &Attachment,
        input: &Value,
    ) -> Result<Option<Value>, PluginError> {
        let args: Vec<String> = attachment.cni_args.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let subject = CniRuntimeConf {
            container: attachment.container_id.clone(),
            netns: attachment.netns.clone(),
            link: attachment.if_name.clone(),
            args: args.join(";"),
        };
        let mut waits = RETRIES.iter();
        loop {
            match self.caller.call(config::kind(plugin), verb, &subject, input).await {
                Err(e) if e.is_transient => match waits.next() {
                    Some(wait) => sleep(*wait).await,
                    None => return Err(e),
                },
                other => return other,
            }
        }
    }

    /// Removes cached pods that are not in `sandboxes`, then runs GC on plugins that support it.
    pub async fn recover(&self, sandboxes: &[&str]) {
        for (sandbox, attachments) in cache::all(&self.cache) {
            if sandboxes.contains(&sandbox.as_str()) {
                continue;
            }
            for attachment in attachments.into_iter().filter(|one| is_ours(&self.files, one)) {
                let request = CniRequest {
                    netns: attachment.netns.clone().into(),
                    sandbox: sandbox.clone(),
                    ..CniRequest::default()
                };
                if let Err(e) = self.del(&request).await {
                    warn!(podSandboxID = %sandbox, err = %e, "Failed to remove CNI attachment of a deleted sandbox");
                }
            }
        }
        let Ok(network) = self.network() else { return };
        if !config::has_status(&network.version) {
            return;
        }
        let valid: Vec<Value> =
            sandboxes.iter().map(|id| json!({"containerID": id, "ifname": names::POD_LINK})).collect();
        for plugin in &network.plugins {
            let mut input = config::input(&network, plugin, &Map::new(), None);
            if let Some(object) = input.as_object_mut() {
                object.insert("cni.dev/valid-attachments".to_owned(), valid.clone().into());
            }
            if let Err(e) =
                self.caller.call(config::kind(plugin), CniCommand::Gc, &CniRuntimeConf::default(), &input).await
            {
                warn!(err = %e.text, "CNI GC failed");
            }
        }
    }
}

/// Counts a DEL failure of a pod whose namespace is gone. Returns whether the failures suffice in number and duration:
/// otherwise an uninstalled plugin would block the pod's removal forever.
fn counts_as_leaked(failures: &mut BTreeMap<String, (u32, Instant)>, sandbox: &str, now: Instant) -> bool {
    if failures.len() >= COUNTED && !failures.contains_key(sandbox) {
        failures.clear();
    }
    let (count, since) = failures.entry(sandbox.to_owned()).or_insert((0, now));
    *count += 1;
    *count >= LEAKED.0 && now.saturating_duration_since(*since) >= LEAKED.1
}

/// Whether this runtime created the attachment; another runtime on the host may share the cache directory.
fn is_ours(files: &NamespaceFiles, attachment: &Attachment) -> bool {
    let file = std::path::Path::new(&attachment.netns).file_name();
    file.is_some_and(|name| files.is_ours(&name.to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_counts_as_leaked_after_three_failures_and_half_a_minute() {
        let cases: [(&[u64], bool); 5] = [
            (&[0, 10, 20], false),
            (&[0, 10, 30], true),
            (&[0, 40], false),
            (&[0, 1, 2, 3, 29], false),
            (&[0, 1, 2, 3, 31], true),
        ];
        for (seconds, expected) in cases {
            let (mut failures, begin) = (BTreeMap::new(), Instant::now());
            let leaked =
                seconds.iter().map(|s| counts_as_leaked(&mut failures, "pod", begin + Duration::from_secs(*s)));
            assert_eq!(leaked.last(), Some(expected), "{seconds:?}");
        }
    }
}
