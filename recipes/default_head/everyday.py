"""Short everyday questions about life, work, school and code: templates whose slots are filled at random.

The questions add words and tasks to the conversations, and therefore to the draft vocabulary. No held-out
prompt and no tuning prompt is among them.
"""

from __future__ import annotations

import random
import re

FILLED_PER_TEMPLATE = 96
SLOT = re.compile(r"\{(\w+)\}")


def listed(text: str) -> tuple[str, ...]:
    return tuple(" ".join(item.split()) for item in text.split(";"))


SLOTS = {
    "thing": listed(
        """a zip; a thermostat; a vacuum cleaner; a washing machine; a bicycle pump; a smoke detector; a
        lock; a piano; a camera; a pressure cooker; a hair dryer; a sewing machine; a lawn
        mower; a fountain pen; a compass; a telescope; a hearing aid; a battery; a solar cell; a
        touch screen; a barcode; a parachute; a submarine; a crane; a dishwasher; a toaster; a
        radiator; a water filter; a fire extinguisher; a kite; a helicopter; a diesel engine; a
        3D printer; a magnet; a lever; a mirror; an escalator; a traffic light; a coffee
        machine; a heat pump; a wind turbine; a printer; a microphone; a loudspeaker; a sundial"""
    ),
    "pair": listed(
        """weather and climate; a lake and a pond; jam and marmalade; a crocodile and an alligator; RAM and
        a hard disk; a compiler and an interpreter; a stack and a queue; Java and JavaScript; a
        comet and an asteroid; butter and margarine; a cold and the flu; a virus and a
        bacterium; income tax and sales tax; a debit card and a credit card; a novel and a
        novella; a simile and a metaphor; mean and median; speed and velocity; mass and weight;
        a republic and a monarchy; stocks and bonds; yoga and pilates; a psychologist and a
        psychiatrist; baking soda and baking powder; green tea and black tea; a process and a
        thread; git merge and git rebase; SQL and NoSQL databases; a list and a tuple in Python;
        an alloy and a pure metal; fruits and vegetables; moths and butterflies; rabbits and
        hares; a lawyer and a judge; a cello and a viola; ravens and crows; empathy and
        sympathy; a glacier and an iceberg; correlation and causation"""
    ),
    "person": listed(
        """Isaac Newton; Cleopatra; Nelson Mandela; Galileo Galilei; Frida Kahlo; Charles Darwin; Florence
        Nightingale; Mozart; Leonardo da Vinci; Joan of Arc; Alan Turing; Rosa Parks; Gandhi;
        Genghis Khan; William Shakespeare; Jane Austen; Nikola Tesla; Thomas Edison; Amelia
        Earhart; Neil Armstrong; Julius Caesar; Confucius; Socrates; Vincent van Gogh;
        Beethoven; Simon Bolivar; Harriet Tubman; Marco Polo; Christopher Columbus; Catherine
        the Great; Johannes Gutenberg; Louis Pasteur; Grace Hopper; Katherine Johnson; Charlie
        Chaplin; Abraham Lincoln; Winston Churchill; Rachel Carson; Archimedes; Hypatia"""
    ),
    "event": listed(
        """the French Revolution; the First World War; the fall of the Berlin Wall; the Black Death; the
        moon landing; the California gold rush; the Great Depression; the Boston Tea Party; the
        eruption of Vesuvius; the Russian Revolution; the American Civil War; the Irish potato
        famine; the fall of Constantinople; the building of the Panama Canal; the Battle of
        Waterloo; the Spanish flu; the Chernobyl disaster; the Cuban missile crisis; the Norman
        conquest; the Meiji Restoration; the partition of India; the Dust Bowl; the invention of
        the printing press; the Suez crisis; the Hindenburg disaster; the first Olympic Games"""
    ),
    "story": listed(
        """Hamlet; Cinderella; The Odyssey; Pinocchio; Frankenstein; Robinson Crusoe; Little Red Riding
        Hood; Macbeth; Don Quixote; Moby Dick; Dracula; Alice in Wonderland; The Jungle Book;
        Hansel and Gretel; Peter Pan; A Christmas Carol; The Tortoise and the Hare; King Arthur;
        Robin Hood; Sleeping Beauty; The Iliad; Treasure Island; Gulliver's Travels; The Wizard
        of Oz; Snow White; Oliver Twist; Pride and Prejudice"""
    ),
    "hero": listed(
        """a brave mouse; a shy dragon; a lonely robot; a clumsy wizard; a tired postman; a curious kitten;
        a forgetful ghost; an old sailor; a young inventor; a small cloud; a grumpy bear; a
        baker; a lost umbrella; a travelling musician; a clever crow; a librarian; a turtle; a
        retired spy; a princess; a squirrel; a gardener; a taxi driver; a snowman; a detective;
        a wolf; a firefighter; a magician; a twin sister; an ant"""
    ),
    "deed": listed(
        """finds a map in the attic; is afraid of the dark; wants to learn to fly; opens a bakery; solves a
        mystery in the village; travels to the moon; befriends a stranger; loses a precious
        ring; saves the harvest; misses the last bus; discovers a secret door; tries to bake a
        cake; enters a singing contest; moves to a big city; builds a raft; receives an
        anonymous letter; wakes up a hundred years later; plants a strange seed; learns to tell
        the truth; gets stuck in a snowstorm; has to share a room with a rival"""
    ),
    "theme": listed(
        """autumn leaves; a thunderstorm; my grandmother's kitchen; the sea at night; an old bicycle; the
        first day of school; a broken cup; spring rain; city traffic; a sleeping cat; moonlight;
        a long journey; homesickness; coffee in the morning; a garden in winter; lost time; a
        mountain lake; forgiveness; an empty chair; fireflies; the smell of books; a paper boat;
        a market in summer; silence; new shoes"""
    ),
    "food": listed(
        """potatoes; carrots; spinach; mushrooms; tofu; eggs; salmon; chicken; ground beef; black beans;
        pasta; couscous; quinoa; zucchini; eggplant; bell peppers; broccoli; cauliflower;
        tomatoes; onions; garlic; cheddar; feta; yogurt; coconut milk; peanut butter; sweet
        potatoes; cabbage; leeks; shrimp; tuna; bacon; apples; bananas; oats; corn; peas;
        pumpkin; avocado; noodles; bread crumbs; ginger; honey; walnuts"""
    ),
    "dish": listed(
        """pancakes; tomato soup; lasagna; a fruit salad; banana bread; fried rice; an omelette; guacamole;
        a vegetable curry; pizza dough; chocolate chip cookies; roast chicken; hummus; tacos;
        apple pie; sushi; risotto; mashed potatoes; a smoothie; dumplings; chili; scrambled
        eggs; French toast; a cheesecake; ramen; lemonade; pesto; goulash; a quiche; pickles"""
    ),
    "mess": listed(
        """a coffee stain from a shirt; chewing gum from a shoe; rust from a pan; mold from the bathroom;
        ink from a sofa; grease from an oven; lime scale from a kettle; scratches from a wooden
        table; paint from jeans; a bad smell from a fridge; pet hair from a carpet; wax from a
        jacket; grass stains from trousers; glue from glass; a sticker from a laptop; soot from
        a fireplace; blood from a sheet; weeds from a patio; ants from the kitchen; crayon from
        a wall; tea from a mug; sweat from a cap"""
    ),
    "trip": listed(
        """a week in Iceland; a camping weekend; a business trip to Tokyo; a ski holiday; a day at the
        lake; a school trip; a music festival; a road trip; a hike in the Alps; a cruise; a
        month in Thailand; a city break in Rome; a safari; a flight with a baby; a move to
        another country; a stay with relatives; a picnic"""
    ),
    "worry": listed(
        """I have an exam tomorrow and cannot sleep; my best friend forgot my birthday; I was passed over
        for a promotion; my roommate never does the dishes; my son does not want to go to
        school; I am bored at work; I feel lonely in a new city; I spend too much time on my
        phone; my parents want me to study medicine; I am afraid of flying; I keep losing my
        keys; my colleague takes credit for my ideas; I cannot stop eating sweets; my
        grandfather has died; I want to quit smoking; I have to speak in front of a hundred
        people; my partner snores; I have too many hobbies; my neighbours are noisy; I failed my
        driving test; my cat is sick; I lent money to a friend; I am always late; my team does
        not listen to me; my back hurts from sitting"""
    ),
    "letter": listed(
        """asking my boss for a day off; complaining about a late delivery; thanking a host; cancelling a
        gym membership; inviting friends to a birthday party; apologising for a missed meeting;
        asking a professor for an extension; reporting a broken street lamp to the city; asking
        a hotel for a refund; congratulating a colleague; recommending a former student;
        declining a job offer; asking for a quote from a plumber; announcing a new office;
        reminding a customer of an unpaid invoice; asking for feedback; introducing myself to a
        new team; requesting a transcript; asking the library to buy a book; welcoming a new
        neighbour; selling a used sofa; resigning from a job; rescheduling a dentist appointment"""
    ),
    "product": listed(
        """a stainless steel water bottle; wireless headphones; a scented candle; a standing desk; a yoga
        mat; a wooden puzzle; a travel pillow; running shoes; an electric toothbrush; a
        cast-iron skillet; a desk lamp; a raincoat; a smart watch; a baby stroller; a mountain
        bike; organic soap; a coffee grinder; a bookshelf; a fitness tracker; a tent; a dog
        collar; a lunch box; sunglasses; a leather wallet; a garden hose; a wool blanket; a
        mechanical keyboard; a portable speaker; a board game; a kitchen knife"""
    ),
    "company": listed(
        """a flower shop; a bike repair shop; a tea house; a pet hotel; a second-hand bookshop; a bakery; a
        yoga studio; a toy store; an app for learning the guitar; a gardening blog; a band of
        four friends; a robot; a food truck; a travel agency; a podcast about history; a
        brewery; a climbing gym; a hair salon; a hardware store; a quiz team; a newspaper for
        children; a sailing boat; a puppy; a video game"""
    ),
    "buy": listed(
        """a used car; a mattress; a bicycle; a camera; a winter coat; a phone; a house; a washing machine;
        a guitar; a puppy; a tent; a pair of hiking boots; a monitor; a desk chair; health
        insurance; a tablet; a fish tank; a printer; a backpack; a drill; a carpet; a
        microscope; a pair of glasses; a kayak; a ring"""
    ),
    "civics": listed(
        """the Supreme Court; a parliament; an election; a central bank; the United Nations; a patent; a
        trade union; a census; the stock market; a passport; social security; a referendum; the
        electoral college; a bankruptcy; a treaty; the Senate; a constitution; a budget of a
        city; copyright; a tariff; a veto; a pension; an auction; a visa; a mayor's office; the
        police"""
    ),
    "nature": listed(
        """a frog; a bee; a star; a volcano; a river; a mushroom; a salmon; a seed; an oak tree; a
        hurricane; a coral reef; a glacier; a chicken; a mosquito; a rainbow; a cloud; a spider;
        a kangaroo; a sea turtle; a dragonfly; a diamond; an ant colony; a bat; a cactus; a
        tornado; an eclipse; a tide; a silkworm; a fern"""
    ),
    "why": listed(
        """the sky is blue; leaves change colour; we yawn; cats purr; the sea is salty; popcorn pops; ice
        floats; we have seasons; onions make us cry; bread rises; birds migrate; metal feels
        colder than wood; the moon has phases; we dream; salt melts ice; a boomerang comes back;
        soap cleans; stars twinkle; some people are left-handed; knuckles crack; flamingos are
        pink; planes can fly; milk turns sour; paper burns; we hiccup; mirrors swap left and
        right; time zones exist; hot air rises; wood floats; bananas turn brown"""
    ),
    "health": listed(
        """a migraine; a sprained ankle; food poisoning; asthma; diabetes; high blood pressure; a sunburn;
        hay fever; insomnia; anemia; the common cold; a concussion; lactose intolerance;
        appendicitis; a toothache; vitamin D deficiency; a panic attack; arthritis; heat stroke;
        chickenpox; a sore throat; depression"""
    ),
    "list": listed(
        """largest deserts; Great Lakes; colours of the rainbow; layers of the atmosphere; noble gases;
        bones of the arm; months of the year; primary colours; states of matter; parts of
        speech; Olympic sports; human senses; moons of Jupiter; wonders of the ancient world;
        oceans; chess pieces; food groups; musical notes; types of clouds; countries of
        Scandinavia; string instruments; programming languages; largest cities of Africa;
        planets with rings; kinds of triangles; organs of the body; European capitals; dog
        breeds"""
    ),
    "code": listed(
        """reverses a linked list; sorts a list of dictionaries by a key; counts words in a file; checks
        whether a number is prime; computes Fibonacci numbers; finds the largest element of a
        matrix; converts Celsius to Fahrenheit; merges two sorted lists; validates an email
        address; parses a CSV file; flattens a nested list; removes punctuation from a string;
        draws a triangle of stars; computes a factorial; rolls two dice; finds anagrams; reads a
        configuration file; groups items by their first letter; computes the median; rotates an
        array; checks balanced brackets; generates a random password; counts the days between
        two dates; shuffles a deck of cards; transposes a matrix; computes the greatest common
        divisor; writes a log file; searches a sorted array; capitalises every word; finds the
        longest word; downloads a web page; renders a table"""
    ),
    "coding": listed(
        """Python; Python; Python; JavaScript; Java; C; C++; Rust; Go; Ruby; TypeScript; PHP; Swift; Kotlin;
        Bash"""
    ),
    "query": listed(
        """counts orders per month; finds customers without orders; joins students with their courses;
        returns the second highest price; deletes old log entries; lists products that are out
        of stock; computes the total revenue per region; finds duplicate email addresses;
        updates the address of a user; shows the five newest posts; creates a table for books;
        averages ratings per film; ranks players by score; finds users who signed up last week;
        lists managers and their teams; counts visits per page"""
    ),
    "web": listed(
        """shows a countdown; toggles a dark mode; validates a form; filters a list while typing; sorts a
        table; loads more items on scroll; changes an image every three seconds; reads a file
        that the user picks; stores notes in the browser; formats a date; adds a class to an
        element on click; debounces an input; draws a circle on a canvas; submits a form without
        reloading; copies text to the clipboard; counts characters"""
    ),
    "shell": listed(
        """rename all files of a folder; find text in many files; list running processes; compress a
        directory; show the disk usage; copy files to a server; count lines of code; kill a
        process; change permissions; undo the last commit in git; schedule a job with cron;
        resolve a merge conflict; create a virtual environment; build a Docker image; set an
        environment variable; watch a log file; delete a branch; compare two files"""
    ),
    "record": listed(
        """a city with name, country and population; a car with make, model and price; a recipe with
        ingredients and steps; a student with grades; a weather report; an order with three
        items; a movie with director and cast; a dog with name, breed and age; a company with
        its employees; a calendar event; a song with artist and album; a football match; a
        flight with departure and arrival; a planet; a restaurant with opening hours"""
    ),
    "concept": listed(
        """inflation; photosynthesis; supply and demand; a black hole; natural selection; plate tectonics;
        the water cycle; DNA; opportunity cost; a blockchain; the greenhouse effect;
        probability; recursion; an API; machine learning; cloud computing; the Pythagorean
        theorem; derivatives; a balance sheet; insurance; depreciation; entropy; electric
        current; the immune system; osmosis; public-key encryption; Bayes' theorem; a pyramid
        scheme; diversification; a tax bracket; standard deviation; relativity; quantum
        computing; fermentation; acids and bases; a food chain; a credit score; an index fund;
        logarithms; a database index; binary numbers; herd immunity; the placebo effect;
        cognitive dissonance; a circular economy; net neutrality; gravity"""
    ),
    "debate": listed(
        """homework; zoos; remote work; nuclear energy; a universal basic income; social media for
        teenagers; electric scooters; space travel; daylight saving time; free public transport;
        a sugar tax; video games; year-round school; self-driving cars; fast fashion; tourism; a
        vegetarian diet; compulsory voting; plastic bags; artificial intelligence in schools;
        online shopping; owning a car; learning Latin; cash; tipping; exams; organic farming;
        living in a big city; keeping pets; reading news every day"""
    ),
    "routine": listed(
        """learn Spanish; run five kilometres; read more books; save money; sleep better; drink more water;
        write a novel; grow tomatoes; learn the guitar; lose some weight; meditate; tidy the
        house; prepare for a marathon; study for finals; eat less meat; strengthen the core;
        improve posture; draw every day; learn to swim; reduce screen time; get stronger arms;
        become a better cook; plan a wedding; start a podcast"""
    ),
    "sentence": listed(
        """I can't come to work today because I am sick.; The weather is nice and we should go outside.; Me
        and him went to the store yesterday.; Please send me the report as soon as possible.;
        Where can I buy a ticket?; The movie was way too long and kind of boring.; We need more
        time to finish the project.; Thank you very much for your help.; My phone does not work
        anymore.; The children are playing in the garden.; I would like a table for two.; He
        don't know nothing about cars.; This is the best book I have ever read.; How much does
        this cost?; She has lived here since ten years.; Your order will arrive next Tuesday.;
        Can we talk about the budget tomorrow?; I love to cook for my friends.; The results were
        better than we expected.; Do you speak English?; It is raining cats and dogs.; I lost my
        passport at the airport.; Happy birthday!"""
    ),
    "style": listed("formal; polite; friendly; funny; short; simple; dramatic; persuasive; poetic; clear"),
    "language": listed(
        """French; Spanish; German; Italian; Portuguese; Dutch; Swedish; Latin; Polish; Japanese; Chinese;
        Turkish"""
    ),
    "passage": listed(
        """Maria Lopez was born in Madrid in 1954 and moved to Boston in 1980.; The museum opens at 9 am on
        weekdays and at 11 am on Sundays, and tickets cost 12 euros.; Rain is expected on
        Friday, with winds of up to 60 kilometres an hour.; Acme Corp. reported sales of $4.2
        million in March, up 8 % from February.; The meeting with Dr. Chen in Room 204 was moved
        from Monday to Thursday, 3 pm.; On 12 June the ferry left Oslo with 320 passengers and
        reached Copenhagen the next morning.; The old bridge, built in 1871, was closed after
        the flood and replaced by a tunnel.; Our cafe serves soup, sandwiches and cake, and dogs
        are welcome."""
    ),
    "job": listed(
        """a nurse; a data analyst; a barista; a teacher; a web developer; a carpenter; an accountant; a
        flight attendant; a journalist; a chef; a mechanic; a graphic designer; a librarian; a
        sales assistant; a lab technician; a gardener; a project manager; a translator; a
        lifeguard; a receptionist; a vet; an architect"""
    ),
    "sport": listed(
        """chess; tennis; baseball; cricket; basketball; ice hockey; poker; volleyball; golf; backgammon;
        rugby; table tennis; judo; curling; darts; bowling; checkers; fencing; badminton; water
        polo; Monopoly; bridge"""
    ),
    "sense": listed(
        """the smell of rain; the colour blue; the sound of a violin; the taste of chocolate; snow; the
        feeling of being in love; a sunrise; the desert; a crowded market; an orchestra; a
        roller coaster; cinnamon; silk; the northern sky at night; an old forest; a city after
        midnight; hot sand; a strawberry; the sea; thunder"""
    ),
    "item": listed(
        "apples; pens; notebooks; tickets; eggs; bottles; shirts; stamps; oranges; bags of rice; toys"
    ),
    "name": listed(
        "Anna; Ben; Carla; David; Emma; Farid; Grace; Hugo; Ines; Jack; Lena; Omar; Priya; Sam; Yuki"
    ),
    "small": tuple(str(n) for n in range(2, 13)),
    "large": tuple(str(n) for n in range(15, 400, 7)),
    "few": listed("three; four; five; six; seven; eight; ten"),
    "minutes": listed("5; 10; 12; 25; 40; 45; 60"),
}

TEMPLATES = (
    *("How does {thing} work?", "Who invented {thing}, and why?", "Explain how {thing} works to a child."),
    *("What is the difference between {pair}?", "Explain the difference between {pair} with an example."),
    *("Who was {person}?", "What is {person} famous for?", "Tell me {few} facts about {person}."),
    *("Write a short biography of {person}.", "What happened during {event}?", "Why did {event} happen?"),
    *("What were the consequences of {event}?", "Summarize {story} in a few sentences."),
    *("What is the moral of {story}?", "Describe the main characters of {story}."),
    *("Write a story about {hero} who {deed}.", "Write a bedtime story: {hero} {deed}."),
    *("Write the first paragraph of a novel in which {hero} {deed}.", "Write a poem about {theme}."),
    *("Write a haiku about {theme}.", "Write a song about {theme}.", "Write a funny rhyme about {hero}."),
    *("Write a dialogue between {hero} and {hero}.", "Write a conversation in which {hero} meets {job}."),
    *("What can I cook with {food}, {food} and {food}?", "Suggest a quick meal with {food} and {food}."),
    *("Give me a recipe for {dish}.", "How do I make {dish}?", "Suggest {few} snacks with {food}."),
    *("How long do {food} keep, and how should I store them?", "Plan a week of dinners with {food}."),
    *("How do I remove {mess}?", "What is the best way to get {mess}?", "What should I pack for {trip}?"),
    *("Make a checklist for {trip}.", "Plan {trip} for a family of {small}.", "{worry}. What should I do?"),
    *("{worry}. Can you give me some advice?", "Write an email {letter}.", "Draft a short letter {letter}."),
    *("Write a polite message {letter}.", "Write a product description for {product}."),
    *(
        "Write a slogan for {product}.",
        "Write an honest review of {product}.",
        "Suggest names for {company}.",
    ),
    *("Give me {few} names for {company}.", "Write an advertisement for {company}."),
    *(
        "What should I look for when I buy {buy}?",
        "Is it a good time to buy {buy}?",
        "How does {civics} work?",
    ),
    *(
        "What is the purpose of {civics}?",
        "Describe the life of {nature}.",
        "How is {nature} formed or born?",
    ),
    *("Give me {few} surprising facts about {nature}.", "Why is it that {why}?", "Explain why {why}."),
    *("What are the symptoms of {health}?", "How is {health} treated?", "How can I prevent {health}?"),
    *("List the {list}.", "List {few} {list} with a short description of each.", "Name {few} {list}."),
    *("Write a {coding} function that {code}.", "Write a {coding} program that {code} and explain it."),
    *("How would you write code that {code} in {coding}?", "Write a test for a function that {code}."),
    *("Write an SQL query that {query}.", "Explain step by step an SQL query that {query}."),
    *("Write some JavaScript that {web}.", "Write an HTML page that {web}.", "How do I {shell}?"),
    *(
        "Which command do I use to {shell}?",
        "Give an example of {record} as JSON.",
        "Write JSON for {record}.",
    ),
    *(
        "Explain {concept} with a simple example.",
        "What is {concept}?",
        "Explain {concept} in one paragraph.",
    ),
    *("Write a quiz about {concept}.", "What are the pros and cons of {debate}?", "Is {debate} a good idea?"),
    *("Give {few} arguments against {debate}.", "Write a short essay about {debate}."),
    *(
        "How can I {routine}?",
        "Make a plan for someone who wants to {routine}.",
        "Give me tips to {routine}.",
    ),
    *("Give me a {minutes}-minute routine that helps to {routine}.", "Rewrite in a {style} tone: {sentence}"),
    *("Make this sentence more {style}: '{sentence}'", "Correct the grammar: {sentence}"),
    *("Translate into {language}: {sentence}", "How do you say '{sentence}' in {language}?"),
    *(
        "Extract the facts from this text: '{passage}'",
        "Summarize: {passage}",
        "Rewrite as a list: {passage}",
    ),
    *("Write a short application for a job as {job}.", "What does {job} do all day?"),
    *("Which questions are asked in an interview for {job}?", "Explain the rules of {sport}."),
    *("How do I get better at {sport}?", "Describe {sense} as vividly as you can."),
    *(
        "Describe {sense} in {few} sentences.",
        "{small} {item} cost ${large}. How much do {small} {item} cost?",
    ),
    *("{name} has {large} {item} and gives {small} to each of {small} friends. How many are left?",),
    *("A car drives {large} kilometres in {small} hours. How fast is it?", "What is {large} times {small}?"),
    *("{name} earns ${large} a week and saves {small} % of it. How much is saved in a year?",),
    *("If {name} reads {large} pages in {small} days, how many pages is that in {small} weeks?",),
)


def everyday_questions(seed: int = 0) -> list[str]:
    """Every template with filled slots, up to FILLED_PER_TEMPLATE times; a function of the seed."""
    rng = random.Random(seed)
    questions: dict[str, None] = {}
    for template in TEMPLATES:
        for _ in range(FILLED_PER_TEMPLATE):
            text = SLOT.sub(lambda slot: rng.choice(SLOTS[slot[1]]), template)
            questions[text[0].upper() + text[1:]] = None
    return list(questions)
