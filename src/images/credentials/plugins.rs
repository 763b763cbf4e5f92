//! Credential provider plugins: matching, caching, and single-flight execution (spec 03b §2.3).
//!
//! Plugins that require a service account's token need an API server; without one they are called only
//! for pods without a service account, and only if they allow that.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use futures::future::join_all;
use sha2::{Digest, Sha256};
use tokio::time::Instant;
use tracing::{info, warn};

use super::{
    CredentialSource,
    docker::{DockerConfig, Keyring, Login},
    glob::matches,
    plugin::run,
    plugin_api::{parse, request},
    plugin_cache::Cache,
    plugin_caller::Caller,
    plugin_config::{PluginConfigError, Provider, load},
};
use berth_config::text::quote;
use berth_metrics::{CredentialPlugins, Registry};
use berth_ports::ObjectSource;
use berth_sys::single_flight::SingleFlight;
use berth_types::Pod;

/// `--image-credential-provider-config` and `--image-credential-provider-bin-dir`.
#[derive(Clone, Debug, Default)]
pub struct PluginFlags {
    /// Path of a file, or of a directory of files.
    pub config: PathBuf,
    /// Directory of the plugin binaries.
    pub bin_dir: PathBuf,
}

struct Plugin {
    provider: Arc<Provider>,
    binary: Arc<PathBuf>,
    cache: Arc<Mutex<Cache>>,
    calls: SingleFlight<String, Arc<DockerConfig>>,
}

/// All plugins, in configured order.
#[derive(Default)]
pub struct Plugins {
    list: Vec<Plugin>,
    metrics: Option<Arc<CredentialPlugins>>,
    /// Source of service accounts and tokens; `None` without an API server.
    objects: Option<Arc<dyn ObjectSource>>,
}

impl Plugins {
    /// Reads and validates the configuration; no plugins without flags.
    ///
    /// # Errors
    /// The configuration is invalid: the process exits at start.
    pub async fn open(
        flags: Option<PluginFlags>,
        registry: &Registry,
        objects: Option<Arc<dyn ObjectSource>>,
    ) -> Result<Self, PluginConfigError> {
        let Some(flags) = flags else { return Ok(Self::default()) };
        let reading = tokio::task::spawn_blocking(move || read(&flags));
        let (providers, hash) = reading.await.map_err(|e| PluginConfigError(e.to_string()))??;
        let list = providers
            .into_iter()
            .map(|(provider, binary)| Plugin {
                provider: Arc::new(provider),
                binary: Arc::new(binary),
                cache: Arc::default(),
                calls: SingleFlight::default(),
            })
            .collect();
        Ok(Self { list, metrics: Some(Arc::new(CredentialPlugins::new(registry, &hash))), objects })
    }

    /// Logins for a normalized repository and a pod. A failed plugin is logged and yields no logins.
    pub async fn find(&self, image: &str, pod: &Pod) -> Vec<(Login, CredentialSource)> {
        let Some(metrics) = &self.metrics else { return Vec::new() };
        let asked = self.list.iter().filter(|plugin| plugin.knows(image));
        let answers = join_all(asked.map(|plugin| plugin.ask(image, pod, self.objects.as_deref(), metrics))).await;
        let mut keyring = Keyring::default();
        answers.iter().flatten().for_each(|(logins, source)| keyring.add(logins, source));
        keyring.find(image)
    }
}

impl Plugin {
    fn knows(&self, image: &str) -> bool {
        self.provider.match_images.iter().any(|pattern| matches(pattern, image))
    }

    /// Logins of this plugin; `None` if it is not called for that pod.
    async fn ask(
        &self,
        image: &str,
        pod: &Pod,
        objects: Option<&dyn ObjectSource>,
        metrics: &Arc<CredentialPlugins>,
    ) -> Option<(Arc<DockerConfig>, CredentialSource)> {
        let caller = self.caller(pod, objects).await?;
        let source = caller.account.clone().map_or(CredentialSource::Node, CredentialSource::Account);
        let now = Instant::now().into_std();
        let known = self.cache.lock().unwrap_or_else(PoisonError::into_inner).get(image, &caller.key, now);
        Some(match known {
            Some(logins) => (logins, source),
            None => (self.call(image, caller, metrics).await, source),
        })
    }

    /// Identity that the plugin is called with; `None` if it is not called for that pod.
    async fn caller(&self, pod: &Pod, objects: Option<&dyn ObjectSource>) -> Option<Caller> {
        let account = pod.spec().service_account_name.as_deref().filter(|name| !name.is_empty());
        let (settings, account) = match (&self.provider.token, account) {
            (Some(settings), Some(account)) => (settings, account),
            (Some(settings), None) if settings.requires_account() => return None,
            _ => return Some(Caller::default()),
        };
        let plugin = &self.provider.name;
        let Some(objects) = objects else {
            warn!(plugin = %plugin, serviceAccount = account, "Cannot request a service account token for image pulls without an API server");
            return None;
        };
        match Caller::of(settings, pod, account, objects).await {
            Ok(caller) => caller,
            Err(error) => {
                let pod = pod.object_name();
                warn!(plugin = %plugin, serviceAccount = account, pod, err = %error, "Failed to get service account token for credential provider");
                None
            }
        }
    }

    /// Joins a running call for the same image and identity, or starts one.
    async fn call(&self, image: &str, caller: Caller, metrics: &Arc<CredentialPlugins>) -> Arc<DockerConfig> {
        let key = format!("{image} {}", caller.flight);
        let (provider, binary, cache) = (self.provider.clone(), self.binary.clone(), self.cache.clone());
        let (name, metrics) = (image.to_owned(), metrics.clone());
        let run = || async move { exec((&provider, &binary), &cache, (&name, &caller), &metrics).await };
        let (call, _) = self.calls.join_or_start(key, run);
        call.await.unwrap_or_else(|panicked| {
            warn!(plugin = %self.provider.name, image, err = %panicked, "Failed getting credential from external registry credential provider");
            Arc::default()
        })
    }
}

async fn exec(
    (provider, binary): (&Provider, &PathBuf),
    cache: &Mutex<Cache>,
    (image, caller): (&str, &Caller),
    metrics: &CredentialPlugins,
) -> Arc<DockerConfig> {
    let began = Instant::now();
    let printed = run(binary, provider, &request(&provider.api_version, image, caller)).await;
    metrics.ran(&provider.name, began.elapsed(), printed.is_err());
    let printed = match printed {
        Ok(printed) => printed,
        Err(error) => {
            warn!(plugin = %provider.name, image, err = %error, "Failed getting credential from external registry credential provider");
            return Arc::default();
        }
    };
    match parse(&provider.api_version, &printed) {
        Err(error) => {
            warn!(plugin = %provider.name, image, err = %error, "Failed getting credential from external registry credential provider");
            Arc::default()
        }
        // A plugin that returns the token itself has exchanged nothing: it would be cached for the
        // whole account.
        Ok(answer) if !caller.may_echo && answer.logins.values().any(|login| is_token(login, caller)) => {
            warn!(plugin = %provider.name, image, "Ignoring response of credential provider: it returned the service account token as a credential, and cacheType is not Token");
            Arc::default()
        }
        Ok(answer) => {
            let logins = Arc::new(answer.logins);
            let keep = answer.keep.unwrap_or(provider.default_cache);
            let now = Instant::now().into_std();
            let place = (answer.scope, image, caller.key.as_str());
            cache.lock().unwrap_or_else(PoisonError::into_inner).put(place, logins.clone(), keep, now);
            logins
        }
    }
}

fn is_token(login: &Login, caller: &Caller) -> bool {
    !caller.token.is_empty() && login.password == caller.token
}

/// Plugins with their binaries, and the hash of the configuration.
type ConfiguredPlugins = (Vec<(Provider, PathBuf)>, String);

fn read(flags: &PluginFlags) -> Result<ConfiguredPlugins, PluginConfigError> {
    if flags.config.as_os_str().is_empty() || flags.bin_dir.as_os_str().is_empty() {
        let text = "both --image-credential-provider-config and --image-credential-provider-bin-dir must be set";
        return Err(PluginConfigError(text.to_owned()));
    }
    let files = files(&flags.config)?;
    let mut hasher = Sha256::new();
    let mut texts = Vec::new();
    for path in files {
        let data = fs::read(&path).map_err(|e| {
            PluginConfigError(format!(
                "unable to read external registry credential provider configuration from {}: {e}",
                quote(&path.display().to_string())
            ))
        })?;
        hasher.update(u64::try_from(data.len()).unwrap_or(u64::MAX).to_be_bytes());
        hasher.update(&data);
        let text =
            String::from_utf8(data).map_err(|_| PluginConfigError(format!("{} is not valid UTF-8", path.display())))?;
        info!(path = %path.display(), "Loaded credential provider configuration");
        texts.push(text);
    }
    let providers = load(&texts)?;
    if !flags.bin_dir.is_dir() {
        return Err(PluginConfigError(format!("plugin binary directory {} did not exist", flags.bin_dir.display())));
    }
    let with_binary = |provider: Provider| {
        let binary = flags.bin_dir.join(&provider.name);
        if binary.exists() {
            return Ok((provider, binary));
        }
        Err(PluginConfigError(format!("plugin binary executable {} did not exist", binary.display())))
    };
    let configured: Result<Vec<_>, _> = providers.into_iter().map(with_binary).collect();
    Ok((configured?, format!("sha256:{}", hex::encode(hasher.finalize()))))
}

/// The file itself, or the configuration files of a directory sorted by name.
fn files(path: &Path) -> Result<Vec<PathBuf>, PluginConfigError> {
    let shown = quote(&path.display().to_string());
    let failed = |e: io::Error| PluginConfigError(format!("failed to access path {shown}: {e}"));
    if !fs::metadata(path).map_err(failed)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(path).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let path = entry.path();
        let known = path.extension().is_some_and(|e| ["json", "yaml", "yml"].iter().any(|known| e == *known));
        if known && entry.file_type().map_err(failed)?.is_file() {
            found.push(path);
        }
    }
    found.sort();
    if found.is_empty() {
        return Err(PluginConfigError(format!("no configuration files found in directory {shown}")));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(config: &Path, bin_dir: &Path) -> String {
        let flags = PluginFlags { config: config.to_owned(), bin_dir: bin_dir.to_owned() };
        read(&flags).err().map(|e| e.to_string()).unwrap_or_default()
    }

    fn config(name: &str) -> String {
        format!(
            "{{\"kind\":\"CredentialProviderConfig\",\"apiVersion\":\"kubelet.config.k8s.io/v1\",\"providers\":[{{\
             \"name\":\"{name}\",\"matchImages\":[\"r.io\"],\"defaultCacheDuration\":\"1m\",\
             \"apiVersion\":\"credentialprovider.kubelet.k8s.io/v1\"}}]}}"
        )
    }

    #[test]
    fn what_stops_the_start() {
        let dir = tempfile::tempdir().expect("a directory");
        let (configs, bin) = (dir.path().join("configs"), dir.path().join("bin"));
        fs::create_dir(&configs).expect("made");
        assert!(refused(&configs, Path::new("")).starts_with("both --image-credential-provider-config"));
        let none = format!("no configuration files found in directory \"{}\"", configs.display());
        assert_eq!(refused(&configs, &bin), none);
        fs::write(configs.join("notes.txt"), "junk").expect("written");
        fs::write(configs.join("b.json"), config("one")).expect("written");
        let no_folder = format!("plugin binary directory {} did not exist", bin.display());
        assert_eq!(refused(&configs, &bin), no_folder);
        fs::create_dir(&bin).expect("made");
        let no_binary = format!("plugin binary executable {} did not exist", bin.join("one").display());
        assert_eq!(refused(&configs, &bin), no_binary);
        fs::write(bin.join("one"), "").expect("written");
        assert_eq!(refused(&configs, &bin), "");
        fs::write(configs.join("a.yaml"), config("one")).expect("written");
        assert_eq!(refused(&configs, &bin), "duplicate provider name \"one\" found in configuration file(s)");
    }

    #[test]
    fn the_hash_covers_lengths_and_bytes() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("c.json");
        fs::write(&file, config("one")).expect("written");
        fs::write(dir.path().join("one"), "").expect("written");
        let flags = PluginFlags { config: file, bin_dir: dir.path().to_owned() };
        let (_, hash) = read(&flags).expect("valid");
        let text = config("one");
        let mut input = u64::try_from(text.len()).expect("small").to_be_bytes().to_vec();
        input.extend_from_slice(text.as_bytes());
        assert_eq!(hash, format!("sha256:{}", hex::encode(Sha256::digest(&input))));
    }
}
