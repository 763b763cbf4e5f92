//! What people ask about images, what they are told, and the work between: the same for a daemon that is asked over its
//! socket and for a program that opens the store itself.

use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use rustix::fs::FileType;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::{
    builtin,
    error::{Attempt, ImageError, Kind},
    inspect,
    names::Name,
    platform::Wanted,
    progress::{Progress, Shown},
    record::{Origin, Platform, Record},
    registry::Credentials,
    store::{
        Choice, ImageStore,
        export::Patient,
        verify::{Mending, Verified},
    },
};

/// How often somebody who waits is told how far it is.
const TELL_EVERY: Duration = Duration::from_millis(100);
/// Longest piece of what is known of an image, bytes: a message takes it also where every byte of it is escaped.
const LONGEST_PIECE: usize = 16 << 10;

/// What is asked.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Order {
    /// The images; with a name only that one.
    List {
        /// A name or an id; empty: all.
        name: String,
    },
    /// Bring an image here.
    Pull {
        /// Its name.
        name: String,
        /// Who asks for it; empty: nobody.
        user: String,
        /// Their password.
        password: String,
        /// For which machine; none: this one.
        #[serde(default)]
        platform: Option<Platform>,
    },
    /// Import the images of an archive or a layout, whose descriptor comes along.
    Import {
        /// What an image without a name is called.
        name: Option<String>,
        /// Images of which machines.
        #[serde(default)]
        platforms: Wanted,
    },
    /// Everything that is known of an image.
    Inspect {
        /// A name or an id.
        name: String,
    },
    /// Write images into the file whose descriptor comes along.
    Export {
        /// Names or ids.
        names: Vec<String>,
    },
    /// Remove an image with all its names.
    Remove {
        /// A name or an id.
        name: String,
    },
    /// Look through everything.
    Verify {
        /// Whether what is broken is fetched again.
        repair: bool,
    },
}

/// What is told meanwhile, and at the end.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Told {
    /// How far it is.
    Progress(Vec<Shown>),
    /// An image: listed, pulled, imported or removed.
    Image(Box<Image>),
    /// The next piece of what is known of an image, which is JSON when all pieces are together.
    Piece(String),
    /// Something is broken.
    Broken {
        /// The image.
        image: String,
        /// What of it, and why.
        cause: String,
        /// How mending it went, where it was tried; the text says why it failed.
        mended: Option<Result<(), String>>,
    },
    /// So many images and layers were looked at.
    Verified(usize, usize),
    /// It is done.
    Done,
    /// It failed: whether because there is no such image, and why.
    Failed(bool, String),
}

/// An image as people are shown it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Image {
    /// Its id.
    pub id: String,
    /// Names by tag.
    pub repo_tags: Vec<String>,
    /// Names by digest.
    pub repo_digests: Vec<String>,
    /// Bytes, packed.
    pub size: u64,
    /// Whether it is never collected.
    pub pinned: bool,
    /// Where it came from.
    pub source: Origin,
    /// For which machine it is.
    pub platform: Platform,
    /// When it came here, RFC 3339.
    pub created: String,
    /// When a container was last made of it.
    pub last_used: String,
}

impl From<&Record> for Image {
    fn from(record: &Record) -> Self {
        let time = |nanoseconds: i64| {
            jiff::Timestamp::from_nanosecond(nanoseconds.into()).map(|at| at.to_string()).unwrap_or_default()
        };
        Self {
            id: record.id(),
            repo_tags: record.repo_tags(),
            repo_digests: record.repo_digests(),
            size: record.size,
            pinned: record.pinned,
            source: record.source,
            platform: record.platform.clone(),
            created: time(record.created),
            last_used: time(record.last_used),
        }
    }
}

/// Whom the answers go to. Nobody may be left to hear them.
pub type Teller = mpsc::Sender<Told>;

/// Carries an order out.
///
/// # Errors
/// Why it cannot be done; what was done before stays.
pub async fn carry_out(
    store: &ImageStore,
    order: Order,
    file: Option<OwnedFd>,
    tell: &Teller,
) -> Result<(), ImageError> {
    let said = match order {
        Order::List { name } => images(&store.list(&name)?),
        Order::Pull { name, user, password, platform } => {
            let credentials = Credentials { username: user, password, ..Credentials::default() };
            images(&[pull(store, &name, &credentials, platform, tell).await?])
        }
        Order::Inspect { name } => pieces(&inspect::of(store, &name).await?.to_string()),
        Order::Import { name, platforms } => {
            let file = file.ok_or_else(|| ImageError::invalid("no archive came along"))?;
            let progress: Arc<Progress> = Arc::default();
            let choice = Choice { name: name.as_deref().map(Name::parse).transpose()?, platforms };
            let work = store.import_watched(file, choice, Arc::clone(&progress));
            images(&watched(work, &progress, tell).await?)
        }
        Order::Export { names } => {
            let file = file.ok_or_else(|| ImageError::invalid("no file came along"))?;
            let progress: Arc<Progress> = Arc::default();
            let into = Patient { inner: File::from(file) };
            let file = watched(store.export(names, into, Arc::clone(&progress)), &progress, tell).await?;
            sync(file.inner)?;
            Vec::new()
        }
        Order::Remove { name } => {
            let missing = || ImageError::not_found(format!("image {name:?}: not found"));
            let record = store.status(&name)?.ok_or_else(missing)?;
            store.remove(&record.id()).await?;
            images(&[record])
        }
        Order::Verify { repair } => {
            let progress: Arc<Progress> = Arc::default();
            let mending = if repair { Mending::Yes } else { Mending::No };
            let Verified { images, layers, findings } =
                watched(store.verify(mending, Arc::clone(&progress)), &progress, tell).await?;
            let broken = findings.into_iter().map(|finding| Told::Broken {
                image: finding.image,
                cause: finding.cause,
                mended: finding.mended,
            });
            broken.chain([Told::Verified(images, layers)]).collect()
        }
    };
    for told in said {
        // Whoever asked may have gone.
        let _ = tell.send(told).await;
    }
    Ok(())
}

fn images(records: &[Arc<Record>]) -> Vec<Told> {
    records.iter().map(|record| Told::Image(Box::new(Image::from(&**record)))).collect()
}

/// In pieces a message takes.
fn pieces(text: &str) -> Vec<Told> {
    let mut out = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        // A character is four bytes at most.
        let most = rest.len().min(LONGEST_PIECE);
        let end = (most.saturating_sub(3)..=most).rev().find(|end| rest.is_char_boundary(*end)).unwrap_or(rest.len());
        let (piece, more) = rest.split_at(end);
        out.push(Told::Piece(piece.to_owned()));
        rest = more;
    }
    out
}

async fn pull(
    store: &ImageStore,
    name: &str,
    credentials: &Credentials,
    platform: Option<Platform>,
    tell: &Teller,
) -> Result<Arc<Record>, ImageError> {
    if builtin::HOSTS.contains(&Name::parse(name)?.host.as_str()) {
        return store.pull(name, credentials).await;
    }
    let (pull, progress) = store.pull_watched(name, credentials, platform)?;
    watched(pull, &progress, tell).await
}

/// Tells how far some work is until it is done.
async fn watched<T>(
    work: impl Future<Output = Result<T, ImageError>>,
    progress: &Progress,
    tell: &Teller,
) -> Result<T, ImageError> {
    let mut work = std::pin::pin!(work);
    let mut last = Vec::new();
    loop {
        let done = tokio::time::timeout(TELL_EVERY, &mut work).await;
        let shown = progress.shown();
        if shown != last {
            last.clone_from(&shown);
            // Who is slow to listen misses some; the end is told below.
            let _ = tell.try_send(Told::Progress(shown));
        }
        if let Ok(result) = done {
            return result;
        }
    }
}

/// A file is told to be written when it is on its disk; pipes have none.
fn sync(file: File) -> Result<(), ImageError> {
    let stat = rustix::fs::fstat(file.as_fd()).attempt("look at the archive")?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
        file.sync_data().attempt("sync archive")?;
    }
    Ok(())
}

/// The last thing that is told.
pub fn last(outcome: Result<(), ImageError>) -> Told {
    match outcome {
        Ok(()) => Told::Done,
        Err(error) => Told::Failed(error.kind == Kind::NotFound, error.text),
    }
}
