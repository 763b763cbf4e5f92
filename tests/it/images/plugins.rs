//! Credential provider plugins as processes, in real time: a paused clock would exceed their timeout.

use std::{collections::BTreeMap, fs, path::Path, sync::Arc};

use async_trait::async_trait;
use berth::images::PluginFlags;
use berth_ports::{Clock, EnsureImage, ObjectError, ObjectSource, PullSecret, ServiceAccount, TokenRequest};
use berth_types::{Pod, api};
use serde_json::json;

use crate::images::fixture::{FixtureOptions, ImageManagerFixture, request, simple};
use berth_testkit::{clock::TokioClock, pods::pod_with, scripted_cri::ScriptedCri};

/// Service accounts: all but `plain` have the role annotation.
struct Accounts;

#[async_trait]
impl ObjectSource for Accounts {
    async fn config_map(&self, _: &str, _: &str) -> Result<Arc<BTreeMap<String, String>>, ObjectError> {
        Err(ObjectError::Other("none".to_owned()))
    }
    async fn secret(&self, _: &str, _: &str) -> Result<Arc<BTreeMap<String, Vec<u8>>>, ObjectError> {
        Err(ObjectError::Other("none".to_owned()))
    }
    fn services(&self, _: &str) -> Option<Vec<Arc<api::Service>>> {
        None
    }
    async fn runtime_handler(&self, _: Option<&str>) -> Result<String, ObjectError> {
        Ok(String::new())
    }
    async fn pull_secrets(&self, _: &Pod) -> (Vec<PullSecret>, Vec<String>) {
        (Vec::new(), Vec::new())
    }
    async fn service_account(&self, _: &str, name: &str) -> Result<ServiceAccount, ObjectError> {
        let role = (name != "plain").then(|| ("example.com/role".to_owned(), format!("role of {name}")));
        Ok(ServiceAccount { uid: format!("uid-{name}"), annotations: role.into_iter().collect() })
    }
    async fn token(&self, pod: &Pod, ask: &TokenRequest) -> Result<String, ObjectError> {
        let account = pod.spec().service_account_name.clone().unwrap_or_default();
        Ok(format!("{}-for-{}", account, ask.audience))
    }
}

/// A pull for a pod of that service account.
fn of_account(account: &str, image: &str) -> EnsureImage {
    let spec = json!({"serviceAccountName": account, "containers": [{"name": "main"}]});
    request(&pod_with(&format!("of-{account}"), json!({}), spec), image)
}

/// A fixture with one plugin for `*.io`: the shell, running `script`.
async fn room(script: &str) -> ImageManagerFixture {
    room_with(script, "", None).await
}

/// A fixture whose plugin requires service account tokens.
async fn room_of_accounts(script: &str, cache_type: &str) -> ImageManagerFixture {
    let token_attributes = format!(
        "  tokenAttributes: {{serviceAccountTokenAudience: registry, cacheType: {cache_type}, requireServiceAccount: true, \
         requiredServiceAccountAnnotationKeys: [example.com/role]}}\n"
    );
    room_with(script, &token_attributes, Some(Arc::new(Accounts))).await
}

async fn room_with(script: &str, more: &str, accounts: Option<Arc<dyn ObjectSource>>) -> ImageManagerFixture {
    let dir = Arc::new(tempfile::tempdir().expect("a directory"));
    let path = |name: &str| dir.path().join(name);
    fs::write(path("script"), script.replace("@DIR@", &dir.path().display().to_string())).expect("written");
    fs::create_dir(path("bin")).expect("made");
    std::os::unix::fs::symlink("/bin/sh", path("bin/acr")).expect("linked");
    let config = format!(
        "kind: CredentialProviderConfig\napiVersion: kubelet.config.k8s.io/v1\nproviders:\n- name: acr\n  \
         apiVersion: credentialprovider.kubelet.k8s.io/v1\n  matchImages: ['*.io']\n  defaultCacheDuration: 0s\n  \
         args: ['{}']\n  env: [{{name: GREETING, value: hello}}]\n{more}",
        path("script").display()
    );
    fs::write(path("plugins.yaml"), config).expect("written");
    let plugins = Some(PluginFlags { config: path("plugins.yaml"), bin_dir: path("bin") });
    let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
    let choice = FixtureOptions { plugins, accounts, ..FixtureOptions::default() };
    ImageManagerFixture::at(ScriptedCri::new(clock.clone()), clock, dir, choice).await
}

fn answer(scope: &str) -> String {
    format!(
        "cat >> @DIR@/asked; echo >> @DIR@/asked; echo '{{\"kind\":\"CredentialProviderResponse\",\
         \"apiVersion\":\"credentialprovider.kubelet.k8s.io/v1\",\"cacheKeyType\":\"{scope}\",\"cacheDuration\":\"5m\",\
         \"auth\":{{\"*.io\":{{\"username\":\"'$GREETING'\",\"password\":\"p\"}}}}}}'"
    )
}

fn asked(dir: &Path) -> Vec<String> {
    let text = fs::read_to_string(dir.join("asked")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn one_answer_serves_a_registry() {
    // AC-03b-13
    let room = room(&answer("Registry")).await;
    room.ensure(simple("r.io/a:1")).await.expect("pulled");
    room.ensure(simple("r.io/b:1")).await.expect("pulled");
    room.ensure(simple("other.example/c:1")).await.expect("pulled");
    assert_eq!(room.pulled_as(), ["hello", "hello", ""]);
    let request = "{\"kind\":\"CredentialProviderRequest\",\"apiVersion\":\"credentialprovider.kubelet.k8s.io/v1\",\
                   \"image\":\"r.io/a\"}";
    assert_eq!(asked(room.dir.path()), [request]);
    assert!(room.registry.gather().iter().any(|f| f.name() == "kubelet_credential_provider_config_info"));
}

#[tokio::test]
async fn an_image_s_answer_serves_that_image() {
    let room = room(&answer("Image")).await;
    for image in ["r.io/a:1", "r.io/a:2", "r.io/b:1"] {
        room.ensure(simple(image)).await.expect("pulled");
    }
    assert_eq!(asked(room.dir.path()).len(), 2);
}

#[tokio::test]
async fn junk_and_failures_leave_the_pull_anonymous() {
    // AC-03b-14
    for (script, errors) in [("cat > /dev/null; echo junk with a secret", 0.0), ("echo oops >&2; exit 3", 1.0)] {
        let room = room(script).await;
        room.ensure(simple("r.io/a")).await.expect("pulled");
        assert_eq!(room.pulled_as(), [""]);
        assert_eq!(room.counter("kubelet_credential_provider_plugin_errors_total", &[("plugin_name", "acr")]), errors);
        assert!(room.events().iter().all(|event| !event.contains("secret")));
    }
}

#[tokio::test]
async fn a_plugin_is_asked_with_the_token_of_the_pods_account() {
    let room = room_of_accounts(&answer("Registry"), "ServiceAccount").await;
    for (account, image) in [("a", "r.io/a:1"), ("a", "r.io/b:1"), ("b", "r.io/c:1"), ("plain", "r.io/d:1")] {
        room.ensure(of_account(account, image)).await.expect("pulled");
    }
    room.ensure(simple("r.io/e:1")).await.expect("pulled");
    assert_eq!(
        room.pulled_as(),
        ["hello", "hello", "hello", "", ""],
        "neither without the role nor without an account"
    );
    let requests: Vec<serde_json::Value> =
        asked(room.dir.path()).iter().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let account_fields =
        |at: usize| (requests[at]["serviceAccountToken"].clone(), requests[at]["serviceAccountAnnotations"].clone());
    assert_eq!(requests.len(), 2, "once for each account: {requests:?}");
    assert_eq!(account_fields(0), (json!("a-for-registry"), json!({"example.com/role": "role of a"})));
    assert_eq!(account_fields(1), (json!("b-for-registry"), json!({"example.com/role": "role of b"})));
}

#[tokio::test]
async fn a_token_that_is_handed_on_is_no_password_for_an_account() {
    let echo = "token=$(sed 's/.*serviceAccountToken\":\"\\([^\"]*\\)\".*/\\1/'); echo '{\"kind\":\"CredentialProviderResponse\",\
                \"apiVersion\":\"credentialprovider.kubelet.k8s.io/v1\",\"cacheKeyType\":\"Registry\",\"cacheDuration\":\"5m\",\
                \"auth\":{\"*.io\":{\"username\":\"u\",\"password\":\"'$token'\"}}}'";
    for (cache_type, user) in [("ServiceAccount", ""), ("Token", "u")] {
        let room = room_of_accounts(echo, cache_type).await;
        room.ensure(of_account("a", "r.io/a:1")).await.expect("pulled");
        assert_eq!(room.pulled_as(), [user], "{cache_type}");
    }
}
